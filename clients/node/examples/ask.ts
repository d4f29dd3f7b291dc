/** Asks, prints the text as it arrives and writes the speech to a WAV file. */

import { writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { Audio, OmniClient, OmniError, wav } from "../src";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    target: { type: "string", default: "localhost:50051" },
    token: { type: "string" },
    timeout: { type: "string", default: "60" },
    pipeline: { type: "string", default: "" },
    out: { type: "string", default: "answer.wav" },
  },
});

async function main(): Promise<void> {
  const client = new OmniClient(values.target, { token: values.token });
  const text = positionals.length ? positionals.join(" ") : "What is the capital of France?";
  const request = { pipeline: values.pipeline, prompt: { content: { $case: "text", value: text } } } as const;
  const sound: Buffer[] = [];
  let format: Audio["format"] | undefined;
  try {
    for await (const { event } of client.stream(request, { timeoutMs: Number(values.timeout) * 1e3 })) {
      if (event?.$case !== "output") continue;
      const content = event.value.content;
      if (content?.$case === "text") process.stdout.write(content.value.text);
      if (content?.$case === "audio") {
        sound.push(content.value.data);
        format = content.value.format;
      }
    }
    process.stdout.write("\n");
    if (format) writeFileSync(values.out!, wav({ data: Buffer.concat(sound), format }));
  } catch (error) {
    if (!(error instanceof OmniError)) throw error;
    console.error(`${error.code} ${error.reason}: ${error.message}`);
    for (const { field, description } of error.violations) console.error(`  ${field}: ${description}`);
    process.exitCode = 1;
  } finally {
    client.close();
  }
}

void main();
