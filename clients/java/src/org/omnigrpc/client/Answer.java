package org.omnigrpc.client;

import com.google.protobuf.ByteString;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import org.omnigrpc.v1.Accepted;
import org.omnigrpc.v1.AudioFormat;
import org.omnigrpc.v1.Finished;
import org.omnigrpc.v1.ImageChunk;
import org.omnigrpc.v1.Output;

/**
 * All that a request gave. What the pipeline does not make, or was not asked for, is empty. Several answers (n above 1)
 * are joined; read the events to tell them apart.
 *
 * @param audio whole samples in the encoding of {@code audioFormat}
 * @param video the parts of a film, joined
 */
public record Answer(
    Accepted accepted,
    Finished finished,
    String text,
    ByteString audio,
    Optional<AudioFormat> audioFormat,
    List<Image> images,
    ByteString video) {

  /** A picture: the bytes of a file. */
  public record Image(ByteString data, String mimeType, int width, int height) {}

  /** The answer that the events add up to. */
  static Answer of(Events events) {
    Accepted accepted = Accepted.getDefaultInstance();
    Finished finished = Finished.getDefaultInstance();
    StringBuilder text = new StringBuilder();
    ByteString audio = ByteString.EMPTY;
    ByteString picture = ByteString.EMPTY;
    ByteString video = ByteString.EMPTY;
    Optional<AudioFormat> format = Optional.empty();
    List<Image> images = new ArrayList<>();
    while (events.hasNext()) {
      var event = events.next();
      switch (event.getEventCase()) {
        case ACCEPTED -> accepted = event.getAccepted();
        case FINISHED -> finished = event.getFinished();
        default -> { }
      }
      Output output = event.getOutput();
      switch (output.getContentCase()) {
        case TEXT -> text.append(output.getText().getText());
        case AUDIO -> {
          audio = audio.concat(output.getAudio().getData());
          format = Optional.of(output.getAudio().getFormat());
        }
        case IMAGE -> {
          ImageChunk part = output.getImage();
          picture = picture.concat(part.getData());
          if (part.getLast()) {
            images.add(new Image(picture, part.getMimeType(), part.getWidth(), part.getHeight()));
            picture = ByteString.EMPTY;
          }
        }
        case VIDEO -> video = video.concat(output.getVideo().getData());
        default -> { }
      }
    }
    return new Answer(accepted, finished, text.toString(), audio, format, List.copyOf(images), video);
  }
}
