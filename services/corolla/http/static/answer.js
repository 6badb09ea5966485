// One streamed answer, which goes on where its stream broke.

const LONGEST_S = 60;
const PAUSES_MS = [100, 250, 500, 1000, 2000];

/** A name for a request: who sends it again, with what has come, gets what is missing. */
export function newRequestId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Asks for an answer, and hands its text on as it comes. A stream that breaks is asked for again, with the tokens that
 * have come: what follows is what was missing.
 *
 * @param body of /v1/chat/completions
 * @param onText called with `(text, reasoning)`, what is new of both
 * @param onBreak called when the stream broke, before it is asked for again
 * @returns {usage, reason}
 */
export async function answer(service, body, signal, onText, onBreak) {
  const named = { ...body, stream: true, stream_options: { include_usage: true }, request_id: newRequestId() };
  const received = [];
  let usage = null, reason = null, brokenMs = null, attempt = 0;
  for (;;) {
    try {
      const rest = received.length ? { received, resume_from: received.length } : {};
      for await (const event of service.watch("POST", "v1/chat/completions", { ...named, ...rest }, signal)) {
        brokenMs = null;
        attempt = 0;
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        received.push(...(choice.token_ids ?? []));
        reason = choice.finish_reason ?? reason;
        onText(choice.delta.content ?? "", choice.delta.reasoning_content ?? "");
      }
      return { usage, reason };
    } catch (failure) {
      if (reason !== null) return { usage, reason };
      brokenMs ??= performance.now();
      // Who asks for the rest of an answer waits for a service that is full, or has no chain at the moment.
      const mayPass = failure.mayPass || (attempt > 0 && Boolean(failure.retryAfterS));
      const wantedMs = failure.mayPass ? 0 : 1000 * failure.retryAfterS;
      const pauseMs = Math.max(PAUSES_MS[Math.min(attempt, PAUSES_MS.length - 1)], wantedMs);
      if (signal.aborted || !mayPass || performance.now() + pauseMs - brokenMs > LONGEST_S * 1000) throw failure;
      attempt += 1;
      onBreak();
      await pause(pauseMs, signal);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    setTimeout(resolve, ms);
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}
