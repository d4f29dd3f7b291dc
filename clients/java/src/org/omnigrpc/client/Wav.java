package org.omnigrpc.client;

import com.google.protobuf.ByteString;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import org.omnigrpc.v1.AudioEncoding;
import org.omnigrpc.v1.AudioFormat;

/** WAV files: RIFF/WAVE, 16-bit PCM or 32-bit float as the format says. */
public final class Wav {
  private Wav() {}

  /** Writes sound to a file. */
  public static void write(Path path, ByteString data, AudioFormat format) throws IOException {
    boolean floating = format.getEncoding() == AudioEncoding.AUDIO_ENCODING_PCM_F32LE;
    int sampleBytes = floating ? 4 : 2;
    int frameBytes = sampleBytes * format.getChannels();
    ByteBuffer header = ByteBuffer.allocate(44).order(ByteOrder.LITTLE_ENDIAN);
    header.put(ascii("RIFF")).putInt(36 + data.size()).put(ascii("WAVEfmt ")).putInt(16);
    header.putShort((short) (floating ? 3 : 1)).putShort((short) format.getChannels());
    header.putInt(format.getSampleRateHz()).putInt(format.getSampleRateHz() * frameBytes);
    header.putShort((short) frameBytes).putShort((short) (8 * sampleBytes));
    header.put(ascii("data")).putInt(data.size());
    try (OutputStream file = Files.newOutputStream(path)) {
      file.write(header.array());
      data.writeTo(file);
    }
  }

  private static byte[] ascii(String text) {
    return text.getBytes(StandardCharsets.US_ASCII);
  }
}
