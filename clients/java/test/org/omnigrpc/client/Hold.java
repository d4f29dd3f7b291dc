package org.omnigrpc.client;

import io.grpc.netty.NettyChannelBuilder;
import java.io.IOException;
import java.io.OutputStream;
import java.time.Duration;
import java.util.concurrent.TimeUnit;

/** Holds a connection with the shortest pings that the server takes: one call, silence until stdin ends, another call. */
public final class Hold {
  private Hold() {}

  public static void main(String[] arguments) throws IOException {
    var channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext()
        .keepAliveTime(10, TimeUnit.SECONDS)
        .keepAliveTimeout(5, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(true)
        .build();
    try (OmniClient client = OmniClient.over(channel).withTimeout(Duration.ofSeconds(20))) {
      client.serverInfo();
      System.out.println("held");
      System.in.transferTo(OutputStream.nullOutputStream());
      client.serverInfo();
    }
  }
}
