package org.omnigrpc.client;

import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.MetadataUtils;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.omnigrpc.v1.AbortRequest;
import org.omnigrpc.v1.AbortResponse;
import org.omnigrpc.v1.AddRequestRequest;
import org.omnigrpc.v1.GetLoadRequest;
import org.omnigrpc.v1.GetServerInfoRequest;
import org.omnigrpc.v1.GetServerInfoResponse;
import org.omnigrpc.v1.OmniServiceGrpc;
import org.omnigrpc.v1.Prompt;
import org.omnigrpc.v1.StageLoad;

/**
 * A client of one server, for any number of calls at once. Every method throws {@link OmniException}. Without a timeout
 * a request has its pipeline's longest duration.
 */
public final class OmniClient implements AutoCloseable {
  private final ManagedChannel channel;
  private final String token;
  private final Duration timeout;

  private OmniClient(ManagedChannel channel, String token, Duration timeout) {
    this.channel = channel;
    this.token = token;
    this.timeout = timeout;
  }

  /** A client over plain text; {@code target} is "localhost:50051" for instance. */
  public static OmniClient plaintext(String target) {
    return over(pinging(target).usePlaintext().build());
  }

  /** A client over TLS. */
  public static OmniClient tls(String target) {
    return over(pinging(target).build());
  }

  /** A client over a channel of one's own, which it closes. */
  public static OmniClient over(ManagedChannel channel) {
    return new OmniClient(channel, null, null);
  }

  private static NettyChannelBuilder pinging(String target) {
    // A model can think for minutes in silence: pings tell a dead peer from a busy one. The server takes one every 10 s.
    // Message limits stay gRPC's own: no message of the contract is larger than 1 MiB.
    return NettyChannelBuilder.forTarget(target)
        .keepAliveTime(60, TimeUnit.SECONDS)
        .keepAliveTimeout(20, TimeUnit.SECONDS);
  }

  /** The same client with a token, sent as "authorization: Bearer ..." with every call. */
  public OmniClient withToken(String token) {
    return new OmniClient(channel, token, timeout);
  }

  /** The same client with a deadline for every call. */
  public OmniClient withTimeout(Duration timeout) {
    return new OmniClient(channel, token, timeout);
  }

  /** The channel, for generated stubs of one's own (sessions, streamed input). */
  public ManagedChannel channel() {
    return channel;
  }

  /** A request with a text prompt, to be completed. */
  public static AddRequestRequest.Builder text(String prompt) {
    return AddRequestRequest.newBuilder().setPrompt(Prompt.newBuilder().setText(prompt));
  }

  /** Submits a request; its events, as they come. */
  public Events stream(AddRequestRequest request) {
    return new Events(() -> stub(request.getRequestId()).addRequest(request));
  }

  /** The whole answer. */
  public Answer generate(AddRequestRequest request) {
    try (Events events = stream(request)) {
      return Answer.of(events);
    }
  }

  /** Aborts requests: what became of each, in the order asked. */
  public List<AbortResponse.Result> abort(List<String> requestIds) {
    var request = AbortRequest.newBuilder().addAllRequestIds(requestIds).build();
    return typed(() -> stub("").abort(request)).getResultsList();
  }

  /** What is served: pipelines, stages, modalities, formats, limits, capabilities. */
  public GetServerInfoResponse serverInfo() {
    return typed(() -> stub("").getServerInfo(GetServerInfoRequest.getDefaultInstance()));
  }

  /** The present load of every stage and replica. */
  public List<StageLoad> load() {
    return typed(() -> stub("").getLoad(GetLoadRequest.getDefaultInstance())).getStagesList();
  }

  /** Closes the channel; calls that still run are cancelled. */
  @Override
  public void close() {
    channel.shutdownNow();
    try {
      channel.awaitTermination(5, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  private OmniServiceGrpc.OmniServiceBlockingStub stub(String requestId) {
    Metadata metadata = new Metadata();
    if (token != null) {
      metadata.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    }
    if (!requestId.isEmpty()) {
      // Gateways hash on it, so that all calls about one request meet on one server.
      metadata.put(Metadata.Key.of("omni-request-id", Metadata.ASCII_STRING_MARSHALLER), mirrored(requestId));
    }
    var stub = OmniServiceGrpc.newBlockingStub(channel)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));
    return timeout == null ? stub : stub.withDeadlineAfter(timeout.toMillis(), TimeUnit.MILLISECONDS);
  }

  private static String mirrored(String requestId) {
    boolean printable = requestId.chars().allMatch(c -> c >= ' ' && c <= '~');
    return printable ? requestId : URLEncoder.encode(requestId, StandardCharsets.UTF_8).replace("+", "%20");
  }

  private static <T> T typed(Supplier<T> call) {
    try {
      return call.get();
    } catch (StatusRuntimeException error) {
      throw OmniException.of(error);
    }
  }
}
