/** Whether what came of a call is what the list expects. The rules are in tests/conformance/README.md. */

export type Json = { [name: string]: any };

/** What came of a call. */
export interface Outcome {
  messages: Json[];
  code: string;
  message: string;
  domain: string;
  reason: string;
  fields: string[];
  retryMs?: number;
  headers: Json;
  trailers: Json;
}

const MAX_AUDIO = 64 << 10;
const MAX_MESSAGE = 1 << 20;
const BYTES_PER_SAMPLE = 2;

const isMap = (value: unknown): value is Json => typeof value === "object" && value !== null && !Array.isArray(value);
const same = (one: unknown, two: unknown) => JSON.stringify(one) === JSON.stringify(two);
const show = (value: unknown) => JSON.stringify(value);

function absent(value: any): boolean {
  if (Array.isArray(value)) return value.length === 0;
  if (isMap(value)) return Object.keys(value).length === 0;
  return value === undefined || value === null || ["", "0", "false"].includes(String(value));
}

/** Whether a value has the expected form. */
export function matches(expected: any, found: any): boolean {
  if (expected === "*") return !absent(found);
  if (isMap(expected)) {
    return isMap(found) && Object.entries(expected).every(([name, value]) => matches(value, found[name]));
  }
  if (Array.isArray(expected) && expected.length > 0) {
    return (
      Array.isArray(found) && found.length === expected.length && expected.every((value, n) => matches(value, found[n]))
    );
  }
  return (absent(expected) && absent(found)) || String(expected) === String(found);
}

/** What is wrong with the outcome of a call of `rpc`. */
export function* problems(rpc: string, expect: Json, outcome: Outcome): Generator<string> {
  yield* checkStatus(expect, outcome);
  for (const kind of ["headers", "trailers"] as const) {
    if (!matches(expect[kind] ?? {}, outcome[kind])) yield `${kind} are ${show(outcome[kind])}`;
  }
  if (rpc === "AddRequest" || rpc === "SubmitInteraction") yield* checkStream(rpc, expect, outcome);
  else if (outcome.messages.length !== (outcome.code === "OK" ? 1 : 0)) {
    yield `${outcome.messages.length} messages came with ${outcome.code}`;
  }
  let place = 0;
  for (const wanted of expect.messages ?? []) {
    while (place < outcome.messages.length && !matches(wanted, outcome.messages[place])) place++;
    if (place++ >= outcome.messages.length) {
      yield `no message (behind those found before) is ${show(wanted)}`;
      return;
    }
  }
}

function* checkStatus(expect: Json, outcome: Outcome): Generator<string> {
  const code = expect.code ?? "OK";
  if (outcome.code !== code) yield `code is ${outcome.code}, not ${code} (${outcome.reason} ${outcome.message})`;
  if (!outcome.message.includes(expect.says ?? "")) yield `message is "${outcome.message}"`;
  if (expect.reason === undefined) return;
  if (outcome.reason !== expect.reason) yield `reason is "${outcome.reason}", not "${expect.reason}"`;
  if (expect.reason && outcome.domain !== "omni-grpc") yield `domain is "${outcome.domain}"`;
  if (!same([...outcome.fields].sort(), [...(expect.fields ?? [])].sort())) yield `fields are ${show(outcome.fields)}`;
  if (Boolean(outcome.retryMs) !== (expect.retry ?? false)) yield `retry is ${outcome.retryMs} ms`;
  if (outcome.trailers["grpc-retry-pushback-ms"] !== outcome.retryMs?.toString()) {
    yield `the pushback is ${outcome.trailers["grpc-retry-pushback-ms"]}, RetryInfo says ${outcome.retryMs}`;
  }
}

function kindOf(message: Json): string {
  return Object.keys(message.response ?? message).find((name) => name !== "seq" && name !== "epoch") ?? "";
}

function sizeOf(output: Json): number {
  return Buffer.from((output.audio ?? output.image ?? {}).data ?? "", "base64").length;
}

function* checkStream(rpc: string, expect: Json, outcome: Outcome): Generator<string> {
  const kinds = outcome.messages.map(kindOf);
  const events = outcome.messages.filter((m) => rpc === "AddRequest" || m.response).map((m) => m.response ?? m);
  yield* checkOrder(rpc, kinds, events, outcome.code === "OK");
  yield* checkContiguous(events);
  const runs = kinds.filter((kind, n) => kind !== kinds[n - 1]);
  if (expect.kinds && !same(runs, expect.kinds)) yield `kinds are ${runs}, not ${expect.kinds}`;
  const newest = events.at(-1)?.epoch ?? 0;
  const outputs: Json[] = events.filter((e) => (e.epoch ?? 0) === newest && e.output).map((e) => e.output);
  for (const [stage, wanted] of Object.entries(expect.text ?? {})) {
    const text = outputs.filter((o) => o.stage === stage).map((o) => o.text?.text ?? "").join("");
    if (text !== wanted) yield `text of ${stage} is "${text}", not "${wanted}"`;
  }
  for (const [stage, wanted] of Object.entries(expect.bytes ?? {})) {
    const size = outputs.filter((o) => o.stage === stage).reduce((sum, o) => sum + sizeOf(o), 0);
    if (size !== wanted) yield `${stage} gave ${size} bytes, not ${wanted}`;
  }
}

function* checkOrder(rpc: string, kinds: string[], events: Json[], ok: boolean): Generator<string> {
  const seqs = events.map((event) => Number(event.seq ?? 0));
  if (seqs.some((seq, n) => n > 0 && seq !== seqs[n - 1] + 1)) yield `seq has a gap: ${seqs}`;
  const accepted = kinds.filter((kind) => kind === "accepted").length;
  if (accepted > 0 && seqs[0] !== 0) yield `seq begins with ${seqs[0]}`;
  if (accepted > 1) yield "accepted came twice";
  if (events.some((event, n) => n > 0 && (event.epoch ?? 0) < (events[n - 1].epoch ?? 0))) yield "the epoch falls";
  if (rpc !== "AddRequest") return;
  if (kinds.length > 0 && kinds[0] !== "accepted") yield `the first event is ${kinds[0]}`;
  const finished = kinds.flatMap((kind, n) => (kind === "finished" ? [n] : []));
  if (!same(finished, ok ? [kinds.length - 1] : [])) yield `finished came at ${finished} of ${kinds.length}`;
}

function* checkContiguous(events: Json[]): Generator<string> {
  const nextSample: Json = {};
  const nextOffset: Json = {};
  for (const { output, epoch } of events) {
    if (!output) continue;
    const size = sizeOf(output);
    if (size > (output.audio ? MAX_AUDIO : MAX_MESSAGE)) yield `an output of ${output.stage} has ${size} bytes`;
    if (output.audio) {
      const start = Number(output.audio.startSample ?? 0);
      if (start !== (nextSample[output.stage] ?? start)) yield `start_sample is ${start}`;
      nextSample[output.stage] = start + size / BYTES_PER_SAMPLE;
    }
    if (output.image) {
      const key = `${output.stage} ${epoch ?? 0}`;
      if (Number(output.image.offset ?? 0) !== (nextOffset[key] ?? 0)) yield `offset is ${output.image.offset ?? 0}`;
      nextOffset[key] = output.image.last ? 0 : (nextOffset[key] ?? 0) + size;
    }
  }
}
