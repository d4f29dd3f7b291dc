/** Holds a connection with the shortest pings that the server takes: one call, silence until stdin ends, another call. */

import { once } from "node:events";
import { OmniClient } from "../src";

async function main(): Promise<void> {
  const channel = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
  };
  const client = new OmniClient(process.argv[2], { channel });
  await client.serverInfo({ timeoutMs: 20_000 });
  console.log("held");
  process.stdin.resume();
  await once(process.stdin, "end");
  await client.serverInfo({ timeoutMs: 20_000 });
  client.close();
}

void main();
