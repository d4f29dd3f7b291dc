package org.omnigrpc.conformance;

import com.google.gson.JsonObject;
import java.util.List;

/** What came of a call; {@code retryMs} is 0 where a retry does not help. */
record Outcome(
    List<JsonObject> messages,
    String code,
    String message,
    String domain,
    String reason,
    List<String> fields,
    long retryMs,
    JsonObject headers,
    JsonObject trailers) {}
