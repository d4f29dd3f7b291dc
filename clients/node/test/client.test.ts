/** Calls a server that serves `echo`: OMNI_GRPC_TARGET=HOST:PORT node --test build/test/client.test.js */

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, test } from "node:test";
import { AbortResponse_Outcome as Outcome, AddRequestRequest, EventState_State as State, Modality, OmniClient, OmniError, Request, SubmitInteractionRequest } from "../src";

// Everything is gRPC's default, the limit of 4 MiB on messages too.
const client = new OmniClient(process.env.OMNI_GRPC_TARGET);
after(() => client.close());

const ask = (text: string, script?: object, modality = Modality.TEXT): Exclude<Request, string> => ({
  prompt: { content: { $case: "text", value: text } },
  outputModalities: [modality],
  stageParams: script && [{ stage: Modality[modality].toLowerCase(), params: { $case: "custom", value: script } }],
});
const failure = (code: string, reason?: string) => (error: unknown) =>
  error instanceof OmniError && error.code === code && (reason === undefined || error.reason === reason);

async function ended(requestId: string): Promise<void> {
  for (const until = Date.now() + 5000; Date.now() < until; ) {
    const [{ outcome }] = await client.abort([requestId]);
    if (outcome === Outcome.ALREADY_FINISHED) return;
  }
  assert.fail(`${requestId} goes on`);
}

/** What the call gives once it is no longer refused for that reason: the server has not yet heard what came before. */
async function eventually<T>(call: () => Promise<T>, reason: string): Promise<T> {
  for (const until = Date.now() + 5000; ; ) {
    try {
      return await call();
    } catch (error) {
      if (!(error instanceof OmniError && error.reason === reason) || Date.now() > until) throw error;
    }
  }
}

test("the whole answer", async () => {
  const answer = await client.generate("hello big world");
  assert.equal(answer.text, "hello big world");
  assert.equal(answer.audio?.data.length, 14400);
  assert.equal(answer.audio?.format.sampleRateHz, 24000);
  assert.deepEqual([...answer.images[0].data.subarray(1, 4)], [...Buffer.from("PNG")]);
  assert.equal(answer.accepted.pipeline, "echo");
  assert.equal(answer.finished.usage?.promptTokens, 3);
});

test("200 MiB through gRPC's default limits", async () => {
  let size = 0;
  for await (const { event } of client.stream(ask("x", { outputs: 200, bytes: 1 << 20 }, Modality.IMAGE), { timeoutMs: 60_000 })) {
    if (event?.$case === "output" && event.value.content?.$case === "image") size += event.value.content.value.data.length;
  }
  assert.equal(size, 200 << 20);
});

test("a refusal is typed, with reason and fields", async () => {
  await assert.rejects(client.generate({ ...ask("x"), pipeline: "nope" }), failure("NOT_FOUND", "PIPELINE_NOT_FOUND"));
  const error: OmniError = await client.generate(ask("x", { colour: "red" })).then(() => assert.fail(), (e) => e);
  assert.deepEqual(error.violations.map((v) => v.field), ["stage_params[0].custom.colour"]);
  assert.equal(error.retryAfterMs, undefined);
  assert.notEqual(error.pod, "");
});

test("leaving the loop aborts the request", async () => {
  const requestId = randomUUID();
  for await (const { event } of client.stream({ ...ask("x", { hang_at: 1 }), requestId })) {
    if (event?.$case === "output") break;
  }
  await ended(requestId);
});

test("a signal cancels, a deadline passes", async () => {
  const requestId = randomUUID();
  const signal = AbortSignal.timeout(200);
  await assert.rejects(client.generate({ ...ask("x", { hang_at: 1 }), requestId }, { signal }), failure("CANCELLED"));
  await ended(requestId);
  await assert.rejects(client.generate(ask("x", { hang_at: 1 }), { timeoutMs: 200 }), failure("DEADLINE_EXCEEDED"));
  await assert.rejects(client.serverInfo({ signal: AbortSignal.abort() }), failure("CANCELLED"));
});

test("input that streams", async () => {
  const requestId = randomUUID();
  const events = client.stream({ requestId, resumable: true, outputModalities: [Modality.TEXT] });
  assert.equal((await events.next()).value?.event?.$case, "accepted");
  const chunks = ["one ", "two"].map((value, seq) => ({ seq, input: { $case: "text", value } as const }));
  const summary = await client.feed(requestId, chunks);
  assert.equal(summary.acceptedChunks, 2);
  let text = "";
  for await (const { event } of events) {
    if (event?.$case === "output" && event.value.content?.$case === "text") text += event.value.content.value.text;
  }
  assert.equal(text, "one two");
  await assert.rejects(client.feed(requestId, chunks), failure("NOT_FOUND", "REQUEST_NOT_FOUND"));
});

test("much input that streams, and a feeder that breaks off", async () => {
  const requestId = randomUUID();
  const events = client.stream({ requestId, resumable: true, outputModalities: [Modality.TEXT] });
  await events.next();
  const word = "x".repeat(1 << 16) + " ";
  function* words() {
    for (let seq = 0; seq < 64; seq++) yield { seq, input: { $case: "text", value: word } } as const;
  }
  await assert.rejects(client.feed(requestId, (function* () {
    yield { seq: 0, input: { $case: "text", value: word } } as const;
    throw new Error("lost the thread");
  })()), /lost the thread/);
  const summary = await eventually(() => client.feed(requestId, words()), "FEEDER_ACTIVE");
  assert.equal(summary.acceptedChunks + summary.duplicateChunks, 64);
  let size = 0;
  for await (const { event } of events) {
    if (event?.$case === "output" && event.value.content?.$case === "text") size += event.value.content.value.text.length;
  }
  assert.equal(size, 64 * word.length);
});

test("a session that steers its request", async () => {
  const open = AddRequestRequest.fromPartial(ask("x", { outputs: 20, interval_ms: 20 }));
  const states: State[] = [];
  let last = "";
  for await (const { message } of client.interact([
    { message: { $case: "setup", value: { target: { $case: "open", value: open } } } },
    { message: { $case: "event", value: { eventId: "blue", prompt: "blue" } } },
  ])) {
    if (message?.$case === "eventState") states.push(message.value.state);
    if (message?.$case === "response") last = message.value.event!.$case;
  }
  assert.deepEqual(states, [State.QUEUED, State.STARTED, State.COMPLETED]);
  assert.equal(last, "finished");
});

test("messages of a session that fail end it", async () => {
  async function* broken(): AsyncGenerator<SubmitInteractionRequest> {
    throw new Error("no more ideas");
  }
  await assert.rejects(async () => {
    for await (const _ of client.interact(broken()));
  }, /no more ideas/);
});

test("information and load", async () => {
  const info = await client.serverInfo();
  assert.equal(info.defaultPipeline, "echo");
  const { stages } = await client.load();
  assert.deepEqual(stages.slice(0, 3).map((stage) => stage.stage), ["text", "audio", "image"]);
  assert.deepEqual((await client.abort([randomUUID()])).map((result) => result.outcome), [Outcome.NOT_FOUND]);
});
