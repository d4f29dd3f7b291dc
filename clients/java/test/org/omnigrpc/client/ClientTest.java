package org.omnigrpc.client;

import com.google.protobuf.Struct;
import com.google.protobuf.Value;
import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.UUID;
import org.omnigrpc.v1.AbortResponse;
import org.omnigrpc.v1.AddRequestRequest;
import org.omnigrpc.v1.StageParams;

/** Calls a server that serves {@code echo}, at OMNI_GRPC_TARGET. Ends with 1 at the first surprise. */
public final class ClientTest {
  private final OmniClient client;

  private ClientTest(OmniClient client) {
    this.client = client;
  }

  public static void main(String[] arguments) {
    try (OmniClient client = OmniClient.plaintext(System.getenv("OMNI_GRPC_TARGET"))) {
      ClientTest test = new ClientTest(client.withTimeout(Duration.ofSeconds(20)));
      test.theWholeAnswer();
      test.aRefusalIsTyped();
      test.leavingAbortsTheRequest();
      test.aDeadlinePasses();
      test.informationAndLoad();
    }
  }

  private void theWholeAnswer() {
    Answer answer = client.generate(OmniClient.text("hello big world").build());
    same("hello big world", answer.text());
    same(14400, answer.audio().size());
    same(24000, answer.audioFormat().orElseThrow().getSampleRateHz());
    same("PNG", answer.images().get(0).data().substring(1, 4).toStringUtf8());
    same("echo", answer.accepted().getPipeline());
    same(3L, answer.finished().getUsage().getPromptTokens());
  }

  private void aRefusalIsTyped() {
    OmniException error = failure(() -> client.generate(scripted("", "colour")));
    same(Status.Code.INVALID_ARGUMENT, error.code());
    same("INVALID_FIELD", error.reason());
    same("omni-grpc", error.domain());
    same("stage_params[0].custom.colour", error.violations().get(0).field());
    same(true, error.retryAfter().isEmpty());
    same(false, error.pod().isEmpty());
    same("request_ids", failure(() -> client.abort(List.of())).violations().get(0).field());
  }

  private void leavingAbortsTheRequest() {
    String id = UUID.randomUUID().toString();
    try (Events events = client.stream(scripted(id, "hang_at"))) {
      while (!events.next().hasOutput()) { }
    }
    ended(id);
  }

  private void aDeadlinePasses() {
    String id = UUID.randomUUID().toString();
    OmniClient hasty = client.withTimeout(Duration.ofMillis(200));
    same(Status.Code.DEADLINE_EXCEEDED, failure(() -> hasty.generate(scripted(id, "hang_at"))).code());
    ended(id);
  }

  private void informationAndLoad() {
    same("echo", client.serverInfo().getDefaultPipeline());
    same("text", client.load().get(0).getStage());
    var results = client.abort(List.of(UUID.randomUUID().toString()));
    same(AbortResponse.Outcome.OUTCOME_NOT_FOUND, results.get(0).getOutcome());
  }

  private void ended(String id) {
    long until = System.nanoTime() + 5_000_000_000L;
    while (client.abort(List.of(id)).get(0).getOutcome() != AbortResponse.Outcome.OUTCOME_ALREADY_FINISHED) {
      same(true, System.nanoTime() < until);
    }
  }

  private static AddRequestRequest scripted(String id, String key) {
    Struct custom = Struct.newBuilder().putAllFields(Map.of(key, Value.newBuilder().setNumberValue(1).build())).build();
    StageParams params = StageParams.newBuilder().setStage("text").setCustom(custom).build();
    return OmniClient.text("x").setRequestId(id).addStageParams(params).build();
  }

  private static OmniException failure(Runnable call) {
    try {
      call.run();
    } catch (OmniException error) {
      return error;
    }
    throw new AssertionError("it succeeded");
  }

  private static void same(Object expected, Object found) {
    if (!Objects.equals(expected, found)) {
      throw new AssertionError("expected " + expected + ", found " + found);
    }
  }
}
