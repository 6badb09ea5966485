// Server-sent events out of the bytes of a reply.

/** Cuts a text that comes in pieces into events; `[name, data]` each. */
export class EventReader {
  #rest = "";

  /** The events that a further piece completes. */
  *take(piece) {
    this.#rest += piece;
    for (let end; (end = this.#rest.indexOf("\n\n")) >= 0; ) {
      const lines = this.#rest.slice(0, end).split("\n");
      this.#rest = this.#rest.slice(end + 2);
      const of = (field) => lines.filter((line) => line.startsWith(`${field}: `)).map((line) => line.slice(field.length + 2));
      const data = of("data");
      // What begins with a colon is a comment: the other end is still there.
      if (data.length) yield [of("event")[0] ?? "message", data.join("\n")];
    }
  }
}

/** The events of a reply, until it ends. */
export async function* eventsOf(response) {
  const reader = new EventReader();
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) yield* reader.take(piece);
}

// Not every browser can iterate over a stream.
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let part; !(part = await reader.read()).done; ) yield part.value;
  } finally {
    await reader.cancel().catch(() => {});
  }
}
