/** Runs a conformance list against a server: run ADDRESS LIST. Prints TAP; the rules are in tests/conformance/README.md. */

import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { Client, ClientDuplexStream, credentials, Metadata, StatusObject } from "@grpc/grpc-js";
import { parse } from "yaml";
import { HealthCheckRequest, HealthCheckResponse } from "../gen/grpc/health/v1/health";
import * as omni from "../gen/omni_grpc/v1/service";
import { OmniError } from "../src";
import { Json, matches, Outcome, problems } from "./check";

interface Type {
  fromJSON(json: unknown): any;
  toJSON(message: any): unknown;
  encode(message: any): { finish(): Uint8Array };
  decode(data: Uint8Array): any;
}

const SERVICE = "/omni_grpc.v1.OmniService";
const METHODS: { [rpc: string]: [path: string, request: Type, response: Type] } = {
  AddRequest: [`${SERVICE}/AddRequest`, omni.AddRequestRequest, omni.AddRequestResponse],
  StreamingUpdate: [`${SERVICE}/StreamingUpdate`, omni.StreamingUpdateRequest, omni.StreamingUpdateResponse],
  SubmitInteraction: [`${SERVICE}/SubmitInteraction`, omni.SubmitInteractionRequest, omni.SubmitInteractionResponse],
  Abort: [`${SERVICE}/Abort`, omni.AbortRequest, omni.AbortResponse],
  GetServerInfo: [`${SERVICE}/GetServerInfo`, omni.GetServerInfoRequest, omni.GetServerInfoResponse],
  GetLoad: [`${SERVICE}/GetLoad`, omni.GetLoadRequest, omni.GetLoadResponse],
  Check: ["/grpc.health.v1.Health/Check", HealthCheckRequest, HealthCheckResponse],
};
const DEADLINE_MS = 10_000;
const EVENTUALLY_MS = 10_000;

/** A call under way; whatever its shape, a stream of messages both ways. */
class Call {
  readonly heard: Json[] = [];
  private readonly call: ClientDuplexStream<any, any>;
  private readonly messages: AsyncIterator<any>;
  private readonly status: Promise<StatusObject>;
  private headers: Json = {};

  constructor(channel: Client, readonly rpc: string, step: Json) {
    const [path, request, response] = METHODS[rpc];
    const metadata = new Metadata();
    for (const [name, value] of Object.entries(step.metadata ?? {})) metadata.set(name, String(value));
    this.call = channel.makeBidiStreamRequest(
      path,
      (json: Json) => Buffer.from(request.encode(request.fromJSON(json)).finish()),
      (data: Buffer) => response.toJSON(response.decode(data)) as Json,
      metadata,
      { deadline: Date.now() + (step.deadline_ms ?? DEADLINE_MS) },
    );
    this.call.on("metadata", (headers: Metadata) => (this.headers = headers.getMap()));
    this.call.on("error", () => undefined); // "status" says it too.
    this.status = new Promise((resolve) => this.call.on("status", resolve));
    this.messages = this.call[Symbol.asyncIterator]();
    this.send(step);
  }

  send(step: Json): void {
    // A call that has ended takes no notice; its end says why.
    if (this.call.destroyed || this.call.writableEnded) return;
    for (const message of step.messages ?? []) this.call.write(message);
    if (!step.open) this.call.end();
  }

  cancel(): void {
    this.call.cancel();
  }

  /** The next message; undefined when the call has ended. */
  async read(): Promise<Json | undefined> {
    const { value, done } = await this.messages.next().catch(() => ({ value: undefined, done: true }));
    if (done) return undefined;
    this.heard.push(value);
    return value;
  }

  async outcome(): Promise<Outcome> {
    while (await this.read());
    const status = await this.status;
    const error = OmniError.from(status);
    return {
      messages: this.heard,
      code: error.code,
      message: error.message,
      domain: error.domain,
      reason: error.reason,
      fields: error.violations.map((violation) => violation.field),
      retryMs: error.retryAfterMs,
      headers: this.headers,
      trailers: status.metadata.getMap(),
    };
  }
}

async function end(call: Call, expect: Json = {}): Promise<string[]> {
  return [...problems(call.rpc, expect, await call.outcome())];
}

async function whole(channel: Client, step: Json): Promise<string[]> {
  for (const until = Date.now() + EVENTUALLY_MS; ; await sleep(50)) {
    const found = await end(new Call(channel, step.rpc, step), step.expect);
    if (found.length === 0 || !step.eventually || Date.now() > until) return found;
  }
}

async function awaited(call: Call, wanted: Json): Promise<string[]> {
  for (let message; (message = await call.read()); ) if (matches(wanted, message)) return [];
  return [`${JSON.stringify(await call.outcome())} came before ${JSON.stringify(wanted)}`];
}

async function take(channel: Client, step: Json, calls: Map<string, Call>): Promise<string[]> {
  if (step.start) calls.set(step.start, new Call(channel, step.rpc, step));
  else if (step.rpc) return whole(channel, step);
  else if (step.send) calls.get(step.send)!.send(step);
  else if (step.await) return awaited(calls.get(step.await)!, step.message);
  else if (step.cancel) calls.get(step.cancel)!.cancel();
  else if (step.end) return end(calls.get(step.end)!, step.expect);
  else throw new Error(`not a step: ${JSON.stringify(step)}`);
  return [];
}

async function runCase(channel: Client, template: Json): Promise<string[]> {
  const id = `case-${randomBytes(6).toString("hex")}`;
  const one: Json = JSON.parse(JSON.stringify(template).replaceAll("${id}", id));
  const calls = new Map<string, Call>();
  try {
    for (const step of one.steps ?? [one]) {
      const found = await take(channel, step, calls);
      if (found.length > 0) return found;
    }
    return [];
  } finally {
    for (const call of calls.values()) call.cancel();
  }
}

async function main(address: string, list: string): Promise<void> {
  const channel = new Client(address, credentials.createInsecure());
  const cases: Json[] = parse(readFileSync(list, "utf8")).cases;
  console.log(`1..${cases.length}`);
  for (const [n, one] of cases.entries()) {
    const found = await runCase(channel, one);
    console.log(`${found.length === 0 ? "ok" : "not ok"} ${n + 1} - ${one.name}`);
    for (const problem of found) console.log(`  # ${problem}`);
    if (found.length > 0) process.exitCode = 1;
  }
  channel.close();
}

void main(process.argv[2], process.argv[3]);
