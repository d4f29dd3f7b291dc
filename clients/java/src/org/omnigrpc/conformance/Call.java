package org.omnigrpc.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.omnigrpc.client.OmniException;
import org.omnigrpc.v1.AbortRequest;
import org.omnigrpc.v1.AbortResponse;
import org.omnigrpc.v1.AddRequestRequest;
import org.omnigrpc.v1.AddRequestResponse;
import org.omnigrpc.v1.GetLoadRequest;
import org.omnigrpc.v1.GetLoadResponse;
import org.omnigrpc.v1.GetServerInfoRequest;
import org.omnigrpc.v1.GetServerInfoResponse;
import org.omnigrpc.v1.StreamingUpdateRequest;
import org.omnigrpc.v1.StreamingUpdateResponse;
import org.omnigrpc.v1.SubmitInteractionRequest;
import org.omnigrpc.v1.SubmitInteractionResponse;

/** A call under way; whatever its shape, a stream of messages both ways. */
final class Call implements StreamObserver<Message> {
  private static final String SERVICE = "omni_grpc.v1.OmniService/";
  private static final int DEADLINE_MS = 10_000;

  private record Method(String path, Message request, Message response) {}

  private static final Map<String, Method> METHODS = Map.of(
      "AddRequest", omni("AddRequest", AddRequestRequest.getDefaultInstance(), AddRequestResponse.getDefaultInstance()),
      "StreamingUpdate", omni("StreamingUpdate",
          StreamingUpdateRequest.getDefaultInstance(), StreamingUpdateResponse.getDefaultInstance()),
      "SubmitInteraction", omni("SubmitInteraction",
          SubmitInteractionRequest.getDefaultInstance(), SubmitInteractionResponse.getDefaultInstance()),
      "Abort", omni("Abort", AbortRequest.getDefaultInstance(), AbortResponse.getDefaultInstance()),
      "GetServerInfo", omni("GetServerInfo",
          GetServerInfoRequest.getDefaultInstance(), GetServerInfoResponse.getDefaultInstance()),
      "GetLoad", omni("GetLoad", GetLoadRequest.getDefaultInstance(), GetLoadResponse.getDefaultInstance()),
      "Check", new Method("grpc.health.v1.Health/Check",
          HealthCheckRequest.getDefaultInstance(), HealthCheckResponse.getDefaultInstance()));

  private static Method omni(String name, Message request, Message response) {
    return new Method(SERVICE + name, request, response);
  }

  private final String rpc;
  private final Method method;
  private final List<JsonObject> heard = new ArrayList<>();
  private final BlockingQueue<Optional<Message>> arrived = new LinkedBlockingQueue<>();
  private final AtomicReference<Metadata> headers = new AtomicReference<>();
  private final AtomicReference<Metadata> trailers = new AtomicReference<>();
  private final ClientCallStreamObserver<Message> requests;
  private volatile OmniException error;
  private boolean ended;

  Call(Channel channel, JsonObject step) throws InvalidProtocolBufferException {
    rpc = step.get("rpc").getAsString();
    method = METHODS.get(rpc);
    Metadata metadata = new Metadata();
    if (step.has("metadata")) {
      step.getAsJsonObject("metadata").entrySet().forEach(entry -> metadata.put(
          Metadata.Key.of(entry.getKey(), Metadata.ASCII_STRING_MARSHALLER), entry.getValue().getAsString()));
    }
    var descriptor = MethodDescriptor.<Message, Message>newBuilder(
            ProtoUtils.marshaller(method.request()), ProtoUtils.marshaller(method.response()))
        .setType(MethodDescriptor.MethodType.BIDI_STREAMING)
        .setFullMethodName(method.path())
        .build();
    long deadline = step.has("deadline_ms") ? step.get("deadline_ms").getAsLong() : DEADLINE_MS;
    Channel observed = ClientInterceptors.intercept(channel,
        MetadataUtils.newAttachHeadersInterceptor(metadata),
        MetadataUtils.newCaptureMetadataInterceptor(headers, trailers));
    var options = CallOptions.DEFAULT.withDeadlineAfter(deadline, TimeUnit.MILLISECONDS);
    requests = (ClientCallStreamObserver<Message>)
        ClientCalls.asyncBidiStreamingCall(observed.newCall(descriptor, options), this);
    send(step);
  }

  /** Sends messages. A call that has ended takes no notice; its end says why. */
  void send(JsonObject step) throws InvalidProtocolBufferException {
    if (ended) {
      return;
    }
    if (step.has("messages")) {
      for (JsonElement message : step.getAsJsonArray("messages")) {
        Message.Builder builder = method.request().newBuilderForType();
        JsonFormat.parser().merge(message.toString(), builder);
        requests.onNext(builder.build());
      }
    }
    if (!step.has("open")) {
      requests.onCompleted();
    }
  }

  void cancel() {
    requests.cancel("cancelled by the list", null);
  }

  /** The next message; null when the call has ended. */
  JsonObject read() throws InterruptedException, InvalidProtocolBufferException {
    Optional<Message> message = ended ? Optional.empty() : arrived.take();
    if (message.isEmpty()) {
      ended = true;
      return null;
    }
    JsonObject json = JsonParser.parseString(JsonFormat.printer().print(message.get())).getAsJsonObject();
    heard.add(json);
    return json;
  }

  List<String> end(JsonObject step) throws InterruptedException, InvalidProtocolBufferException {
    while (read() != null) { }
    OmniException failed = error;
    Outcome outcome = new Outcome(
        heard,
        failed == null ? "OK" : failed.code().name(),
        failed == null ? "" : failed.getMessage(),
        failed == null ? "" : failed.domain(),
        failed == null ? "" : failed.reason(),
        failed == null ? List.of() : failed.violations().stream().map(OmniException.Violation::field).toList(),
        failed == null ? 0 : failed.retryAfter().map(delay -> delay.toMillis()).orElse(0L),
        flat(headers.get()),
        flat(trailers.get()));
    JsonObject expect = step.has("expect") ? step.getAsJsonObject("expect") : new JsonObject();
    return Check.problems(rpc, expect, outcome);
  }

  List<String> await(JsonElement wanted) throws InterruptedException, InvalidProtocolBufferException {
    for (JsonObject message = read(); message != null; message = read()) {
      if (Check.matches(wanted, message)) {
        return List.of();
      }
    }
    return List.of(rpc + " ended (" + error + ") before " + wanted);
  }

  @Override
  public void onNext(Message message) {
    arrived.add(Optional.of(message));
  }

  @Override
  public void onError(Throwable cause) {
    error = OmniException.of(cause);
    arrived.add(Optional.empty());
  }

  @Override
  public void onCompleted() {
    arrived.add(Optional.empty());
  }

  private static JsonObject flat(Metadata metadata) {
    JsonObject found = new JsonObject();
    for (String name : metadata == null ? List.<String>of() : metadata.keys()) {
      if (!name.endsWith(Metadata.BINARY_HEADER_SUFFIX)) {
        found.addProperty(name, metadata.get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER)));
      }
    }
    return found;
  }
}
