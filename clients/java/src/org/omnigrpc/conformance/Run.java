package org.omnigrpc.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.Channel;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.omnigrpc.client.OmniClient;
import org.yaml.snakeyaml.Yaml;

/** Runs a conformance list against a server: Run ADDRESS LIST. Prints TAP; the rules are in tests/conformance/README.md. */
public final class Run {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
  private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private static final long EVENTUALLY_NS = 10_000_000_000L;

  private final Channel channel;
  private final Map<String, Call> calls = new HashMap<>();

  private Run(Channel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, Object> list = new Yaml().load(Files.readString(Path.of(arguments[1])));
    JsonArray cases = GSON.toJsonTree(list).getAsJsonObject().getAsJsonArray("cases");
    boolean failed = false;
    try (OmniClient client = OmniClient.plaintext(arguments[0])) {
      OUT.println("1.." + cases.size());
      for (int n = 0; n < cases.size(); n++) {
        List<String> found = new Run(client.channel()).run(cases.get(n));
        String name = cases.get(n).getAsJsonObject().get("name").getAsString();
        OUT.println((found.isEmpty() ? "ok " : "not ok ") + (n + 1) + " - " + name);
        found.forEach(problem -> OUT.println("  # " + problem));
        failed |= !found.isEmpty();
      }
    }
    System.exit(failed ? 1 : 0);
  }

  private List<String> run(JsonElement template) throws Exception {
    String id = "case-" + UUID.randomUUID();
    JsonObject one = JsonParser.parseString(GSON.toJson(template).replace("${id}", id)).getAsJsonObject();
    JsonArray steps = new JsonArray();
    if (one.has("steps")) {
      steps = one.getAsJsonArray("steps");
    } else {
      steps.add(one);
    }
    try {
      for (JsonElement step : steps) {
        List<String> found = take(step.getAsJsonObject());
        if (!found.isEmpty()) {
          return found;
        }
      }
      return List.of();
    } finally {
      calls.values().forEach(Call::cancel);
    }
  }

  private List<String> take(JsonObject step) throws InterruptedException, InvalidProtocolBufferException {
    if (step.has("start")) {
      calls.put(step.get("start").getAsString(), new Call(channel, step));
    } else if (step.has("rpc")) {
      return whole(step);
    } else if (step.has("send")) {
      named(step, "send").send(step);
    } else if (step.has("await")) {
      return named(step, "await").await(step.get("message"));
    } else if (step.has("cancel")) {
      named(step, "cancel").cancel();
    } else if (step.has("end")) {
      return named(step, "end").end(step);
    } else {
      throw new IllegalArgumentException("not a step: " + step);
    }
    return List.of();
  }

  private List<String> whole(JsonObject step) throws InterruptedException, InvalidProtocolBufferException {
    long until = System.nanoTime() + EVENTUALLY_NS;
    while (true) {
      List<String> found = new Call(channel, step).end(step);
      if (found.isEmpty() || !step.has("eventually") || System.nanoTime() > until) {
        return found;
      }
      Thread.sleep(50);
    }
  }

  private Call named(JsonObject step, String key) {
    return calls.get(step.get(key).getAsString());
  }
}
