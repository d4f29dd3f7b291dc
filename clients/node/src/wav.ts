/** WAV files. */

import { AudioEncoding } from "../gen/omni_grpc/v1/common";
import { Audio } from "./answer";

/** A WAV file that holds the sound: RIFF/WAVE, 16-bit PCM or 32-bit float as the format says. */
export function wav({ data, format }: Audio): Buffer {
  const floating = format.encoding === AudioEncoding.PCM_F32LE;
  const sampleBytes = floating ? 4 : 2;
  const frameBytes = sampleBytes * format.channels;
  const header = Buffer.alloc(44);
  header.write("RIFF", 0);
  header.writeUInt32LE(36 + data.length, 4);
  header.write("WAVEfmt ", 8);
  header.writeUInt32LE(16, 16);
  header.writeUInt16LE(floating ? 3 : 1, 20);
  header.writeUInt16LE(format.channels, 22);
  header.writeUInt32LE(format.sampleRateHz, 24);
  header.writeUInt32LE(format.sampleRateHz * frameBytes, 28);
  header.writeUInt16LE(frameBytes, 32);
  header.writeUInt16LE(8 * sampleBytes, 34);
  header.write("data", 36);
  header.writeUInt32LE(data.length, 40);
  return Buffer.concat([header, data]);
}
