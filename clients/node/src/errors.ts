/** What can go wrong with a call. */

import { Metadata, ServiceError, status } from "@grpc/grpc-js";
import { BadRequest, ErrorInfo, RetryInfo } from "../gen/google/rpc/error_details";
import { Status } from "../gen/google/rpc/status";

/** What is wrong with one field: its path from the message's root, and a description. */
export interface Violation {
  field: string;
  description: string;
}

/** The server sent what the contract rules out: events are missing or out of order. */
export class ProtocolError extends Error {
  override readonly name = "ProtocolError";
}

/** A call ended with a status other than OK. */
export class OmniError extends Error {
  override readonly name = "OmniError";

  constructor(
    /** Name of the status code, "NOT_FOUND" for instance. */
    readonly code: string,
    message: string,
    /** The server's reason, "PIPELINE_NOT_FOUND" for instance; "" where gRPC itself made the status. */
    readonly reason = "",
    /** Whose reason it is: "omni-grpc". */
    readonly domain = "",
    /** The fields that are wrong. */
    readonly violations: readonly Violation[] = [],
    /** Least wait in milliseconds before a retry can help; undefined: a retry does not help. */
    readonly retryAfterMs: number | undefined = undefined,
    /** Id of the request, as the server mirrors it. */
    readonly requestId = "",
    /** The server that answered. */
    readonly pod = "",
  ) {
    super(message);
  }

  /** The error that grpc-js raised, with the details that the server sent. */
  static from(error: ServiceError | { code: number; details: string; metadata: Metadata }): OmniError {
    let info: ErrorInfo | undefined;
    let violations: Violation[] = [];
    let retryAfterMs: number | undefined;
    for (const detail of detailsOf(error.metadata)) {
      switch (detail.typeUrl) {
        case "type.googleapis.com/google.rpc.ErrorInfo":
          info = ErrorInfo.decode(detail.value);
          break;
        case "type.googleapis.com/google.rpc.BadRequest":
          violations = BadRequest.decode(detail.value).fieldViolations;
          break;
        case "type.googleapis.com/google.rpc.RetryInfo": {
          const delay = RetryInfo.decode(detail.value).retryDelay;
          retryAfterMs = delay && delay.seconds * 1e3 + Math.round(delay.nanos / 1e6);
          break;
        }
      }
    }
    return new OmniError(
      status[error.code] ?? "UNKNOWN",
      error.details,
      info?.reason,
      info?.domain,
      violations,
      retryAfterMs,
      first(error.metadata, "omni-request-id"),
      first(error.metadata, "omni-pod"),
    );
  }
}

function detailsOf(metadata: Metadata | undefined): Status["details"] {
  const [packed] = metadata?.get("grpc-status-details-bin") ?? [];
  try {
    return packed instanceof Buffer ? Status.decode(packed).details : [];
  } catch {
    // A proxy's own: what gRPC says of it is all there is.
    return [];
  }
}

function first(metadata: Metadata | undefined, name: string): string {
  return metadata?.get(name)[0]?.toString() ?? "";
}
