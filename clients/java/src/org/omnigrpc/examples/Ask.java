package org.omnigrpc.examples;

import com.google.protobuf.ByteString;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.omnigrpc.client.Events;
import org.omnigrpc.client.OmniClient;
import org.omnigrpc.client.OmniException;
import org.omnigrpc.client.Wav;
import org.omnigrpc.v1.AddRequestRequest;
import org.omnigrpc.v1.AudioChunk;
import org.omnigrpc.v1.Output;

/** Asks, prints the text as it arrives and writes the speech to a WAV file. */
public final class Ask {
  private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

  private Ask() {}

  public static void main(String[] arguments) throws IOException {
    Map<String, String> options = new HashMap<>(Map.of(
        "--target", "localhost:50051", "--timeout", "60", "--pipeline", "", "--out", "answer.wav", "--token", ""));
    List<String> words = new ArrayList<>();
    for (int n = 0; n < arguments.length; n++) {
      if (options.containsKey(arguments[n]) && n + 1 < arguments.length) {
        options.put(arguments[n], arguments[++n]);
      } else {
        words.add(arguments[n]);
      }
    }
    String text = words.isEmpty() ? "What is the capital of France?" : String.join(" ", words);
    AddRequestRequest request = OmniClient.text(text).setPipeline(options.get("--pipeline")).build();
    Duration timeout = Duration.ofMillis((long) (1e3 * Double.parseDouble(options.get("--timeout"))));
    try (OmniClient client = OmniClient.plaintext(options.get("--target"))) {
      String token = options.get("--token");
      OmniClient limited = client.withTimeout(timeout).withToken(token.isEmpty() ? null : token);
      ask(limited, request, Path.of(options.get("--out")));
    } catch (OmniException error) {
      System.err.println(error.code() + " " + error.reason() + ": " + error.getMessage());
      error.violations().forEach(v -> System.err.println("  " + v.field() + ": " + v.description()));
      System.exit(1);
    }
  }

  private static void ask(OmniClient client, AddRequestRequest request, Path out) throws IOException {
    ByteString sound = ByteString.EMPTY;
    AudioChunk heard = null;
    try (Events events = client.stream(request)) {
      while (events.hasNext()) {
        Output output = events.next().getOutput();
        OUT.print(output.getText().getText());
        OUT.flush();
        if (output.hasAudio()) {
          heard = output.getAudio();
          sound = sound.concat(heard.getData());
        }
      }
    }
    OUT.println();
    if (heard != null) {
      Wav.write(out, sound, heard.getFormat());
    }
  }
}
