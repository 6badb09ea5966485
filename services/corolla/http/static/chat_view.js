// The chat: sessions, what was said in them, and the answer as it comes.
import { answer } from "./answer.js";
import { Conversations } from "./conversations.js";
import { byId, element, show } from "./elements.js";

const NEAR_END_PX = 80;
const AGAIN_MS = 1000;

export class ChatView {
  #service;
  #conversations = new Conversations();
  #log = byId("log");
  #message = byId("message");
  #progress = byId("progress");
  #running = null;

  constructor(service) {
    this.#service = service;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    this.#message.addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("new-session").addEventListener("click", () => {
      this.#conversations.begin();
      this.#showAll();
      this.#message.focus();
    });
    this.#showAll();
  }

  async #send() {
    const text = this.#message.value.trim();
    if (!text || this.#running) return;
    const conversation = this.#conversations.current;
    this.#log.querySelector(".failure")?.remove();
    this.#message.value = "";
    this.#fit();
    const asked = turnOf({ role: "user", text });
    const shown = turnOf({ role: "assistant", text: "" });
    this.#log.append(asked, shown);
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#running = new AbortController();
    this.#showRunning(true);
    try {
      const turn = await this.#answer(conversation, text, shown, this.#running.signal);
      this.#conversations.add(conversation, { role: "user", text });
      this.#conversations.add(conversation, turn);
      this.#progress.textContent = "The answer is complete.";
    } catch (failure) {
      if (this.#running.signal.aborted) {
        shown.lastElementChild.textContent = "stopped; the session goes on as if this had not been asked";
        this.#progress.textContent = "Stopped.";
      } else {
        asked.remove();
        shown.remove();
        this.#message.value ||= text;
        this.#fit();
        this.#showFailure(failure);
      }
    } finally {
      this.#running = null;
      this.#showRunning(false);
    }
  }

  /** The turn that answers. A session that has expired is made anew, of what was said in it. */
  async #answer(conversation, text, shown, signal) {
    try {
      return await this.#continue(conversation, text, shown, signal);
    } catch (failure) {
      if (failure.code !== "session_not_found") throw failure;
      conversation.id = null;
      return this.#continue(conversation, text, shown, signal);
    }
  }

  async #continue(conversation, text, shown, signal) {
    const isKept = Boolean(conversation.id);
    const session = conversation.id ?? (await this.#newSession(signal));
    const earlier = isKept ? [] : conversation.turns.map((turn) => ({ role: turn.role, content: turn.text }));
    const body = {
      messages: [...earlier, { role: "user", content: text }],
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
      ...(session ? { session_id: session } : {}),
    };
    const parts = partsOf(shown);
    const begunMs = performance.now();
    const answering = answer(this.#service, body, signal, (content, reasoning) => {
      const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR_END_PX;
      parts.text.appendData(content);
      parts.reasoning.appendData(reasoning);
      parts.thoughts.hidden = !parts.reasoning.data;
      if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
    }, () => {
      this.#progress.textContent = "Waiting: the answer goes on as soon as it can.";
    });
    // A session without a turn knows nothing of what was said before: the next message must not continue it.
    const { usage, reason } = await answering.catch((failure) => {
      if (session && !isKept) this.#discard(session);
      throw failure;
    });
    conversation.id = session;
    const note = noteOf(usage, reason, performance.now() - begunMs);
    parts.note.textContent = note;
    this.#log.scrollTop = this.#log.scrollHeight;
    return { role: "assistant", text: parts.text.data, note };
  }

  /** The name of a session that is made on the service; "": this key may make none. */
  async #newSession(signal) {
    try {
      return (await this.#service.ask("POST", "v1/sessions", {}, signal)).id;
    } catch (failure) {
      if (failure.code !== "scope_denied") throw failure;
      return "";
    }
  }

  /** Ends a session on the service. One that has expired is gone already; a stopped turn may hold it for a moment. */
  #discard(session, numTries = 3) {
    this.#service.ask("DELETE", `v1/sessions/${session}`).catch((failure) => {
      if (failure.mayPass && numTries > 1) setTimeout(() => this.#discard(session, numTries - 1), AGAIN_MS);
    });
  }

  #showAll() {
    this.#log.replaceChildren(...this.#conversations.current.turns.map(turnOf));
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#showSessions();
  }

  #showSessions() {
    const { all, current } = this.#conversations;
    byId("sessions").replaceChildren(...all.map((each) => {
      const choose = element("button", { type: "button", className: "session" }, each.title);
      if (each === current) choose.setAttribute("aria-current", "true");
      choose.disabled = this.#running !== null && each !== current;
      choose.addEventListener("click", () => {
        this.#conversations.current = each;
        this.#showAll();
        byId("sessions").querySelector("[aria-current]").focus();
      });
      const end = element("button", { type: "button", className: "end", "aria-label": `End the session ${each.title}` }, "×");
      end.disabled = this.#running !== null;
      end.addEventListener("click", () => this.#end(each));
      return element("li", {}, choose, end);
    }));
  }

  #end(conversation) {
    if (conversation.id) this.#discard(conversation.id);
    this.#conversations.remove(conversation);
    this.#showAll();
    byId("new-session").focus();
  }

  #showRunning(isRunning) {
    const [send, stop] = [byId("send"), byId("stop")];
    const hadFocus = [send, stop, document.body].includes(document.activeElement);
    this.#log.setAttribute("aria-busy", isRunning);
    send.hidden = isRunning;
    stop.hidden = !isRunning;
    byId("new-session").disabled = isRunning;
    if (hadFocus) (isRunning ? stop : this.#message).focus();
    if (isRunning) this.#progress.textContent = "The model answers.";
    this.#showSessions();
  }

  #showFailure(failure) {
    const sentence = failure.status === 401 ? "the service asks for a key" : failure.message.replace(/\.$/, "");
    const text = `${sentence.charAt(0).toUpperCase()}${sentence.slice(1)}.`;
    this.#log.append(element("p", { className: "failure", role: "alert" }, text));
    this.#progress.textContent = "";
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #fit() {
    this.#message.style.height = "auto";
    this.#message.style.height = `${this.#message.scrollHeight}px`;
  }
}

function turnOf({ role, text, note = "" }) {
  const who = role === "user" ? "You" : "The model";
  return element(
    "article", { className: role, "aria-label": who },
    element("details", { hidden: true }, element("summary", {}, "What it thought"), element("p", {}, "")),
    element("p", { className: "text" }, text),
    element("p", { className: "note" }, note),
  );
}

/** The texts of a turn that is being written. A text of its own for each token would be thousands of nodes. */
function partsOf(shown) {
  const [thoughts, text, note] = shown.children;
  const textOf = (paragraph) => {
    // What an earlier attempt wrote goes: this one begins anew.
    paragraph.replaceChildren(document.createTextNode(""));
    return paragraph.firstChild;
  };
  return { thoughts, text: textOf(text), reasoning: textOf(thoughts.lastElementChild), note };
}

function noteOf(usage, reason, ms) {
  const facts = [];
  if (usage) {
    const seconds = usage.total_seconds || ms / 1000;
    facts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1) facts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
    facts.push(`first after ${usage.time_to_first_token_seconds.toFixed(2)} s`);
    if (usage.recoveries) {
      const times = usage.recoveries === 1 ? "1 recovery" : `${usage.recoveries} recoveries`;
      facts.push(`${times}, which took ${usage.stall_seconds.toFixed(2)} s`);
    }
    if (usage.may_differ_from_token != null) facts.push(`may differ from token ${usage.may_differ_from_token} on`);
  }
  if (reason === "length") facts.push("cut off by the number of tokens");
  return facts.join(" · ");
}
