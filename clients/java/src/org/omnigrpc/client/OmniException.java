package org.omnigrpc.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Optional;

/** A call ended with a status other than OK. */
public final class OmniException extends RuntimeException {
  private static final long serialVersionUID = 1;

  /** What is wrong with one field: its path from the message's root, and a description. */
  public record Violation(String field, String description) {}

  private final transient Status status;
  private final String reason;
  private final String domain;
  private final transient List<Violation> violations;
  private final Duration retryAfter;
  private final String requestId;
  private final String pod;

  /** The exception that gRPC threw, or gave to an observer, with the details that the server sent. */
  public static OmniException of(Throwable cause) {
    if (cause instanceof OmniException same) {
      return same;
    }
    try {
      return new OmniException(cause);
    } catch (InvalidProtocolBufferException notOurs) {
      throw new IllegalStateException("the status has details that do not parse", notOurs);
    }
  }

  private OmniException(Throwable cause) throws InvalidProtocolBufferException {
    super(Optional.ofNullable(Status.fromThrowable(cause).getDescription()).orElse(""), cause);
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    List<Violation> wrong = List.of();
    Duration retry = null;
    com.google.rpc.Status rich = StatusProto.fromThrowable(cause);
    for (Any detail : rich == null ? List.<Any>of() : rich.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        info = detail.unpack(ErrorInfo.class);
      } else if (detail.is(BadRequest.class)) {
        wrong = detail.unpack(BadRequest.class).getFieldViolationsList().stream()
            .map(v -> new Violation(v.getField(), v.getDescription())).toList();
      } else if (detail.is(RetryInfo.class)) {
        var delay = detail.unpack(RetryInfo.class).getRetryDelay();
        retry = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
      }
    }
    status = Status.fromThrowable(cause);
    reason = info.getReason();
    domain = info.getDomain();
    violations = wrong;
    retryAfter = retry;
    requestId = trailer(cause, "omni-request-id");
    pod = trailer(cause, "omni-pod");
  }

  /** The status code. */
  public Status.Code code() {
    return status.getCode();
  }

  /** The server's reason, "PIPELINE_NOT_FOUND" for instance; "" where gRPC itself made the status. */
  public String reason() {
    return reason;
  }

  /** Whose reason it is: "omni-grpc". */
  public String domain() {
    return domain;
  }

  /** The fields that are wrong. */
  public List<Violation> violations() {
    return violations;
  }

  /** The least wait before a retry can help; empty: a retry does not help. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** Id of the request, as the server mirrors it. */
  public String requestId() {
    return requestId;
  }

  /** The server that answered. */
  public String pod() {
    return pod;
  }

  private static String trailer(Throwable cause, String name) {
    Metadata trailers = Status.trailersFromThrowable(cause);
    String value = trailers == null ? null : trailers.get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER));
    return value == null ? "" : value;
  }
}
