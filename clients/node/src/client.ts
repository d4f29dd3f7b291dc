/** The client: one channel, one method per rpc. */

import { ChannelCredentials, ClientOptions, ClientReadableStream, credentials, Metadata, ServiceError } from "@grpc/grpc-js";
import {
  AbortResponse,
  AddRequestRequest,
  AddRequestResponse,
  DeepPartial,
  GetLoadResponse,
  GetServerInfoResponse,
  OmniServiceClient,
  StreamingUpdateRequest,
  StreamingUpdateResponse,
  SubmitInteractionRequest,
  SubmitInteractionResponse,
  UpdateChunk,
} from "../gen/omni_grpc/v1/service";
import { Answer, collect } from "./answer";
import { OmniError, ProtocolError } from "./errors";

/** How a server is reached. */
export interface OmniOptions {
  /** For TLS: `credentials.createSsl()`. Default: plain text. */
  credentials?: ChannelCredentials;
  /** Sent as `authorization: Bearer …` with every call. */
  token?: string;
  /** gRPC's channel options, over KEEPALIVE. */
  channel?: ClientOptions;
}

/** How long a call may take, and what cancels it. */
export interface CallLimits {
  /** Milliseconds. Default: for a request the pipeline's longest duration, for others none. */
  timeoutMs?: number;
  /** Cancels the call, and aborts its request on the server. */
  signal?: AbortSignal;
}

/** A request: a text prompt, or any part of the message. */
export type Request = string | DeepPartial<AddRequestRequest>;

// A model can think for minutes in silence: pings tell a dead peer from a busy one. The server takes one every 10 s.
// Message limits stay gRPC's own: no message of the contract is larger than 1 MiB.
const KEEPALIVE: ClientOptions = { "grpc.keepalive_time_ms": 60_000, "grpc.keepalive_timeout_ms": 20_000 };

type Callback<T> = (error: ServiceError | null, response: T) => void;

/** A client of one server, for any number of calls at once. Every method throws OmniError. */
export class OmniClient {
  /** The generated stub, for what this class does not wrap; it throws grpc-js's errors (see OmniError.from). */
  readonly stub: OmniServiceClient;
  private readonly token: string | undefined;

  constructor(target = "localhost:50051", options: OmniOptions = {}) {
    const channel = { ...KEEPALIVE, ...options.channel };
    this.stub = new OmniServiceClient(target, options.credentials ?? credentials.createInsecure(), channel);
    this.token = options.token;
  }

  /** Closes the channel: no new calls. */
  close(): void {
    this.stub.close();
  }

  /**
   * Submits a request and yields its events: accepted first, finished last. Leaving the loop aborts the request on the
   * server; what came before stays valid.
   */
  async *stream(request: Request, limits: CallLimits = {}): AsyncGenerator<AddRequestResponse, void, undefined> {
    const message = AddRequestRequest.fromPartial(typeof request === "string" ? prompted(request) : request);
    const metadata = this.metadata(message.requestId);
    const call = this.stub.addRequest(message, metadata, deadline(limits));
    let next = 0;
    for await (const event of received(call, limits)) {
      if (event.seq !== next++) throw new ProtocolError(`event ${event.seq} came where ${next - 1} was due`);
      yield event;
    }
  }

  /** The whole answer. */
  generate(request: Request, limits: CallLimits = {}): Promise<Answer> {
    return collect(this.stream(request, limits));
  }

  /** Feeds a resumable request that runs; when `chunks` ends, so does its input. */
  async feed(
    requestId: string,
    chunks: AsyncIterable<DeepPartial<UpdateChunk>> | Iterable<DeepPartial<UpdateChunk>>,
    limits: CallLimits = {},
  ): Promise<StreamingUpdateResponse> {
    let call!: ReturnType<OmniServiceClient["streamingUpdate"]>;
    const summary = settled<StreamingUpdateResponse>((done) => {
      call = this.stub.streamingUpdate(this.metadata(requestId), deadline(limits), done);
    }, limits, () => call.cancel());
    let over = false;
    summary.catch(() => (over = true));
    try {
      call.write(StreamingUpdateRequest.fromPartial({ message: { $case: "header", value: { requestId } } }));
      for await (const chunk of chunks) {
        if (over) break;
        const message = StreamingUpdateRequest.fromPartial({ message: { $case: "chunk", value: chunk } });
        if (!call.write(message)) await drained(call);
      }
    } catch (error) {
      // Broken off: the request waits for another feeder.
      call.cancel();
      throw error;
    }
    call.end();
    return summary;
  }

  /** One session: sends `messages` (setup first) and yields what comes back. */
  async *interact(
    messages: AsyncIterable<DeepPartial<SubmitInteractionRequest>> | Iterable<DeepPartial<SubmitInteractionRequest>>,
    limits: CallLimits = {},
  ): AsyncGenerator<SubmitInteractionResponse, void, undefined> {
    const call = this.stub.submitInteraction(this.metadata(""), deadline(limits));
    const sending = (async () => {
      for await (const message of messages) {
        if (call.destroyed) return;
        if (!call.write(SubmitInteractionRequest.fromPartial(message))) await drained(call);
      }
      call.end();
    })();
    sending.catch((error) => call.destroy(error));
    yield* received(call, limits);
  }

  /** Aborts requests: what became of each, in the order asked. */
  async abort(requestIds: string[], limits: CallLimits = {}): Promise<AbortResponse["results"]> {
    const response = await this.unary<AbortResponse>(limits, (metadata, options, done) =>
      this.stub.abort({ requestIds }, metadata, options, done),
    );
    return response.results;
  }

  /** What is served: pipelines, stages, modalities, formats, limits, capabilities. */
  serverInfo(limits: CallLimits = {}): Promise<GetServerInfoResponse> {
    return this.unary(limits, (metadata, options, done) => this.stub.getServerInfo({}, metadata, options, done));
  }

  /** The present load of every stage and replica. */
  load(limits: CallLimits = {}): Promise<GetLoadResponse> {
    return this.unary(limits, (metadata, options, done) => this.stub.getLoad({}, metadata, options, done));
  }

  private unary<T>(
    limits: CallLimits,
    start: (metadata: Metadata, options: { deadline?: number }, done: Callback<T>) => { cancel(): void },
  ): Promise<T> {
    let call: { cancel(): void };
    return settled<T>((done) => (call = start(this.metadata(""), deadline(limits), done)), limits, () => call.cancel());
  }

  private metadata(requestId: string): Metadata {
    const metadata = new Metadata();
    if (this.token !== undefined) metadata.set("authorization", `Bearer ${this.token}`);
    // Gateways hash on it, so that all calls about one request meet on one server.
    if (requestId) metadata.set("omni-request-id", mirrored(requestId));
    return metadata;
  }
}

function prompted(text: string): DeepPartial<AddRequestRequest> {
  return { prompt: { content: { $case: "text", value: text } } };
}

function mirrored(requestId: string): string {
  return /^[ -~]*$/.test(requestId) ? requestId : encodeURIComponent(requestId);
}

function deadline({ timeoutMs }: CallLimits): { deadline?: number } {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}

function settled<T>(start: (done: Callback<T>) => void, { signal }: CallLimits, cancel: () => void): Promise<T> {
  return new Promise<T>((resolve, reject) => {
    signal?.addEventListener("abort", cancel, { once: true });
    start((error, response) => {
      signal?.removeEventListener("abort", cancel);
      if (error) reject(OmniError.from(error));
      else resolve(response);
    });
    if (signal?.aborted) cancel();
  });
}

async function* received<T>(call: ClientReadableStream<T>, { signal }: CallLimits): AsyncGenerator<T, void, undefined> {
  const cancel = () => call.cancel();
  signal?.addEventListener("abort", cancel, { once: true });
  if (signal?.aborted) cancel();
  try {
    for await (const message of call) yield message as T;
  } catch (error) {
    throw isServiceError(error) ? OmniError.from(error) : error;
  } finally {
    signal?.removeEventListener("abort", cancel);
    call.cancel();
  }
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "metadata" in error && "code" in error;
}

/** Waits until more can be written, or nothing any more. */
function drained(call: NodeJS.EventEmitter): Promise<void> {
  const events = ["drain", "close", "error", "status"];
  return new Promise((resolve) => {
    const done = () => {
      for (const event of events) call.off(event, done);
      resolve();
    };
    for (const event of events) call.on(event, done);
  });
}
