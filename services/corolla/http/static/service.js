// The client service that this page comes from, asked as any other caller asks it.
import { eventsOf } from "./events.js";

const KEY = "corolla.key";

/** What the service says in place of a reply. */
export class Refusal extends Error {
  /** @param retryAfterS seconds after which the same request may succeed; null: the reply does not say so */
  constructor(status, error, retryAfterS = null) {
    super(error?.message ?? `the service answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.retryAfterS = retryAfterS;
  }

  /**
   * Whether the same request may succeed when it is sent again soon: the service stops, or something in front of it does,
   * or a turn that was stopped has not ended yet.
   */
  get mayPass() {
    return ["service_stopping", "session_busy"].includes(this.code) || (this.code === "" && this.status >= 500);
  }
}

/** A reply that broke off, or none at all. */
export class Broken extends Error {
  mayPass = true;
}

export class Service {
  #key = sessionStorage.getItem(KEY) ?? "";
  #given = [];

  /** Called when the service asks for a key; with whether it did not take the one that it was shown. */
  onKeyWanted = (isRefused) => {};

  /** The key for all calls from now on. It stays in the storage of this tab. */
  set key(key) {
    this.#key = key;
    sessionStorage.setItem(KEY, key);
    for (const go of this.#given.splice(0)) go();
  }

  /** Resolves when somebody has given a key. */
  keyGiven() {
    return new Promise((resolve) => this.#given.push(resolve));
  }

  /** The JSON of a reply. Throws Refusal, Broken. */
  async ask(method, path, body, signal) {
    const response = await this.#send(method, path, body, signal);
    return response.json();
  }

  /** The data of each event of a reply, until `[DONE]` or its end. Throws Refusal, Broken. */
  async *watch(method, path, body, signal) {
    const response = await this.#send(method, path, body, signal);
    try {
      for await (const [name, data] of eventsOf(response)) {
        if (name === "error") throw new Refusal(200, JSON.parse(data).error);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    } catch (failure) {
      if (failure instanceof Refusal || signal?.aborted) throw failure;
      throw new Broken("the connection broke");
    }
    throw new Broken("the stream ended early");
  }

  async #send(method, path, body, signal) {
    const headers = {};
    if (this.#key) headers.authorization = `Bearer ${this.#key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), {
        method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
      });
    } catch (failure) {
      if (signal?.aborted) throw failure;
      throw new Broken("the service does not answer");
    }
    if (response.ok) return response;
    const error = await response.json().then((reply) => reply.error, () => undefined);
    const refusal = new Refusal(response.status, error, Number(response.headers.get("retry-after")) || null);
    if (refusal.status === 401) this.onKeyWanted(Boolean(this.#key));
    throw refusal;
  }
}
