package org.omnigrpc.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.IntStream;
import java.util.stream.StreamSupport;

/** Whether what came of a call is what the list expects. The rules are in tests/conformance/README.md. */
final class Check {
  private static final int MAX_AUDIO = 64 << 10;
  private static final int MAX_MESSAGE = 1 << 20;
  private static final int BYTES_PER_SAMPLE = 2;

  private final String rpc;
  private final JsonObject expect;
  private final Outcome outcome;
  private final List<String> found = new ArrayList<>();

  private Check(String rpc, JsonObject expect, Outcome outcome) {
    this.rpc = rpc;
    this.expect = expect;
    this.outcome = outcome;
  }

  /** What is wrong with the outcome of a call of {@code rpc}. */
  static List<String> problems(String rpc, JsonObject expect, Outcome outcome) {
    Check check = new Check(rpc, expect, outcome);
    check.status();
    check.metadata("headers", outcome.headers());
    check.metadata("trailers", outcome.trailers());
    if (rpc.equals("AddRequest") || rpc.equals("SubmitInteraction")) {
      check.stream();
    } else if (outcome.messages().size() != (outcome.code().equals("OK") ? 1 : 0)) {
      check.wrong("%d messages came with %s", outcome.messages().size(), outcome.code());
    }
    check.inOrder();
    return check.found;
  }

  /** Whether a value has the expected form. */
  static boolean matches(JsonElement expected, JsonElement found) {
    if (expected instanceof JsonPrimitive && expected.getAsString().equals("*")) {
      return !absent(found);
    }
    if (expected instanceof JsonObject wanted) {
      return found instanceof JsonObject given
          && wanted.keySet().stream().allMatch(name -> matches(wanted.get(name), given.get(name)));
    }
    if (expected instanceof JsonArray wanted && wanted.size() > 0) {
      return found instanceof JsonArray given && given.size() == wanted.size()
          && IntStream.range(0, wanted.size()).allMatch(n -> matches(wanted.get(n), given.get(n)));
    }
    return absent(expected) && absent(found)
        || expected instanceof JsonPrimitive && found instanceof JsonPrimitive
            && expected.getAsString().equals(found.getAsString());
  }

  private static boolean absent(JsonElement value) {
    if (value instanceof JsonObject object) {
      return object.size() == 0;
    }
    if (value instanceof JsonArray array) {
      return array.size() == 0;
    }
    return value == null || value instanceof JsonNull || Set.of("", "0", "false").contains(value.getAsString());
  }

  private void wrong(String format, Object... values) {
    found.add(String.format(format, values));
  }

  private void metadata(String kind, JsonObject given) {
    if (expect.has(kind) && !matches(expect.get(kind), given)) {
      wrong("%s are %s, not %s", kind, given, expect.get(kind));
    }
  }

  private void inOrder() {
    int place = 0;
    for (JsonElement wanted : array(expect, "messages")) {
      while (place < outcome.messages().size() && !matches(wanted, outcome.messages().get(place))) {
        place++;
      }
      if (place++ >= outcome.messages().size()) {
        wrong("no message (behind those found before) is %s", wanted);
        return;
      }
    }
  }

  private void status() {
    String code = expect.has("code") ? text(expect, "code") : "OK";
    if (!outcome.code().equals(code)) {
      wrong("code is %s, not %s (%s %s)", outcome.code(), code, outcome.reason(), outcome.message());
    }
    if (!outcome.message().contains(text(expect, "says"))) {
      wrong("message is \"%s\"", outcome.message());
    }
    if (!expect.has("reason")) {
      return;
    }
    String reason = text(expect, "reason");
    if (!outcome.reason().equals(reason)) {
      wrong("reason is \"%s\", not \"%s\"", outcome.reason(), reason);
    }
    if (!reason.isEmpty() && !outcome.domain().equals("omni-grpc")) {
      wrong("domain is \"%s\"", outcome.domain());
    }
    List<String> fields = texts(array(expect, "fields")).stream().sorted().toList();
    if (!outcome.fields().stream().sorted().toList().equals(fields)) {
      wrong("fields are %s, not %s", outcome.fields(), fields);
    }
    if ((outcome.retryMs() > 0) != (expect.has("retry") && expect.get("retry").getAsBoolean())) {
      wrong("retry is %d ms", outcome.retryMs());
    }
    if (number(outcome.trailers(), "grpc-retry-pushback-ms") != outcome.retryMs()) {
      wrong("the pushback is %s, RetryInfo says %d", outcome.trailers(), outcome.retryMs());
    }
  }

  private void stream() {
    List<String> kinds = new ArrayList<>();
    List<String> runs = new ArrayList<>();
    List<JsonObject> events = new ArrayList<>();
    for (JsonObject message : outcome.messages()) {
      if (rpc.equals("AddRequest") || message.has("response")) {
        events.add(eventOf(message));
      }
      String kind = kindOf(message);
      if (kinds.isEmpty() || !kinds.get(kinds.size() - 1).equals(kind)) {
        runs.add(kind);
      }
      kinds.add(kind);
    }
    order(kinds, events);
    contiguous(events);
    if (expect.has("kinds") && !runs.equals(texts(array(expect, "kinds")))) {
      wrong("kinds are %s, not %s", runs, expect.get("kinds"));
    }
    sums(events);
  }

  /** Text and bytes of the newest epoch. */
  private void sums(List<JsonObject> events) {
    Map<String, String> text = new HashMap<>();
    Map<String, Integer> bytes = new HashMap<>();
    for (JsonObject event : events) {
      if (event.has("output") && number(event, "epoch") == number(events.get(events.size() - 1), "epoch")) {
        JsonObject output = event.getAsJsonObject("output");
        text.merge(text(output, "stage"), text(object(output, "text"), "text"), String::concat);
        bytes.merge(text(output, "stage"), sizeOf(output), Integer::sum);
      }
    }
    object(expect, "text").entrySet().forEach(wanted -> {
      String given = text.getOrDefault(wanted.getKey(), "");
      if (!given.equals(wanted.getValue().getAsString())) {
        wrong("text of %s is \"%s\", not %s", wanted.getKey(), given, wanted.getValue());
      }
    });
    object(expect, "bytes").entrySet().forEach(wanted -> {
      int given = bytes.getOrDefault(wanted.getKey(), 0);
      if (given != wanted.getValue().getAsInt()) {
        wrong("%s gave %d bytes, not %s", wanted.getKey(), given, wanted.getValue());
      }
    });
  }

  private void order(List<String> kinds, List<JsonObject> events) {
    boolean request = rpc.equals("AddRequest");
    boolean ok = outcome.code().equals("OK");
    List<Integer> finished = IntStream.range(0, kinds.size()).filter(n -> kinds.get(n).equals("finished")).boxed().toList();
    if (request && !finished.equals(ok ? List.of(kinds.size() - 1) : List.of())) {
      wrong("finished came at %s of %d", finished, kinds.size());
    }
    if (request && !kinds.isEmpty() && !kinds.get(0).equals("accepted")) {
      wrong("the first event is %s", kinds.get(0));
    }
    long accepted = kinds.stream().filter("accepted"::equals).count();
    if (accepted > 1) {
      wrong("accepted came twice");
    }
    if (accepted > 0 && number(events.get(0), "seq") != 0) {
      wrong("seq begins with %d", number(events.get(0), "seq"));
    }
    for (int n = 1; n < events.size(); n++) {
      if (number(events.get(n), "seq") != number(events.get(n - 1), "seq") + 1) {
        wrong("seq has a gap at %d", number(events.get(n), "seq"));
      }
      if (number(events.get(n), "epoch") < number(events.get(n - 1), "epoch")) {
        wrong("the epoch falls at seq %d", number(events.get(n), "seq"));
      }
    }
  }

  private void contiguous(List<JsonObject> events) {
    Map<String, Long> nextSample = new HashMap<>();
    Map<String, Long> nextOffset = new HashMap<>();
    for (JsonObject event : events) {
      JsonObject output = object(event, "output");
      String stage = text(output, "stage");
      int size = sizeOf(output);
      if (size > (output.has("audio") ? MAX_AUDIO : MAX_MESSAGE)) {
        wrong("an output of %s has %d bytes", stage, size);
      }
      if (output.has("audio")) {
        long start = number(object(output, "audio"), "startSample");
        if (start != nextSample.getOrDefault(stage, start)) {
          wrong("start_sample is %d, not %d", start, nextSample.get(stage));
        }
        nextSample.put(stage, start + size / BYTES_PER_SAMPLE);
      }
      if (output.has("image")) {
        String key = stage + " " + number(event, "epoch");
        long due = nextOffset.getOrDefault(key, 0L);
        if (number(object(output, "image"), "offset") != due) {
          wrong("offset is %d, not %d", number(object(output, "image"), "offset"), due);
        }
        nextOffset.put(key, object(output, "image").has("last") ? 0 : due + size);
      }
    }
  }

  private static JsonObject eventOf(JsonObject message) {
    return message.has("response") ? message.getAsJsonObject("response") : message;
  }

  private static String kindOf(JsonObject message) {
    return eventOf(message).keySet().stream().filter(n -> !n.equals("seq") && !n.equals("epoch")).findFirst().orElse("");
  }

  private static int sizeOf(JsonObject output) {
    JsonObject part = output.has("audio") ? object(output, "audio") : object(output, "image");
    return Base64.getDecoder().decode(text(part, "data")).length;
  }

  private static JsonObject object(JsonObject from, String name) {
    return from.get(name) instanceof JsonObject value ? value : new JsonObject();
  }

  private static JsonArray array(JsonObject from, String name) {
    return from.get(name) instanceof JsonArray value ? value : new JsonArray();
  }

  private static String text(JsonObject from, String name) {
    return from.get(name) instanceof JsonPrimitive value ? value.getAsString() : "";
  }

  private static long number(JsonObject from, String name) {
    return from.get(name) instanceof JsonPrimitive value ? value.getAsLong() : 0;
  }

  private static List<String> texts(JsonArray from) {
    return StreamSupport.stream(from.spliterator(), false).map(JsonElement::getAsString).toList();
  }
}
