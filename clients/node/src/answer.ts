/** A request's whole answer, put together from its events. */

import { AddRequestResponse } from "../gen/omni_grpc/v1/service";
import { Accepted, Finished } from "../gen/omni_grpc/v1/output";
import { AudioFormat } from "../gen/omni_grpc/v1/common";

/** Sound: whole samples in the format's encoding. */
export interface Audio {
  data: Buffer;
  format: AudioFormat;
}

/** A picture: the bytes of a file. */
export interface Image {
  data: Buffer;
  mimeType: string;
  width: number;
  height: number;
}

/** All that a request gave. What the pipeline does not make, or was not asked for, is empty. */
export interface Answer {
  accepted: Accepted;
  finished: Finished;
  text: string;
  audio?: Audio;
  images: Image[];
  /** The parts of a film, joined. */
  video: Buffer;
}

/** The answer that the events add up to. Several answers (`n` above 1) are joined; read the events to tell them apart. */
export async function collect(events: AsyncIterable<AddRequestResponse>): Promise<Answer> {
  const answer: Partial<Answer> & { images: Image[] } = { images: [] };
  let text = "";
  const audio: Buffer[] = [];
  const image: Buffer[] = [];
  const video: Buffer[] = [];
  for await (const { event } of events) {
    switch (event?.$case) {
      case "accepted":
        answer.accepted = event.value;
        break;
      case "finished":
        answer.finished = event.value;
        break;
      case "output": {
        const content = event.value.content;
        switch (content?.$case) {
          case "text":
            text += content.value.text;
            break;
          case "audio":
            audio.push(content.value.data);
            if (content.value.format) answer.audio = { data: Buffer.alloc(0), format: content.value.format };
            break;
          case "image": {
            const { data, last, mimeType, width, height } = content.value;
            image.push(data);
            if (last) answer.images.push({ data: Buffer.concat(image.splice(0)), mimeType, width, height });
            break;
          }
          case "video":
            video.push(content.value.data);
            break;
        }
      }
    }
  }
  if (answer.audio) answer.audio.data = Buffer.concat(audio);
  return { ...(answer as Answer), text, video: Buffer.concat(video) };
}
