package org.omnigrpc.client;

import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.function.Supplier;
import org.omnigrpc.v1.AddRequestResponse;

/**
 * The events of a request, as they come: accepted first, finished last. Throws {@link OmniException}. Closing it before
 * the end aborts the request on the server; what came before stays valid.
 */
public final class Events implements Iterator<AddRequestResponse>, AutoCloseable {
  private final Context.CancellableContext context = Context.current().withCancellation();
  private final Iterator<AddRequestResponse> responses;
  private long next;

  Events(Supplier<Iterator<AddRequestResponse>> call) {
    Context before = context.attach();
    try {
      responses = call.get();
    } finally {
      context.detach(before);
    }
  }

  @Override
  public boolean hasNext() {
    try {
      return responses.hasNext();
    } catch (StatusRuntimeException error) {
      throw OmniException.of(error);
    }
  }

  @Override
  public AddRequestResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException("the request has ended");
    }
    AddRequestResponse event = responses.next();
    if (event.getSeq() != next++) {
      throw new IllegalStateException("event " + event.getSeq() + " came where " + (next - 1) + " was due");
    }
    return event;
  }

  @Override
  public void close() {
    context.cancel(null);
  }
}
