// The sessions of this tab. They stay in it, and their texts stay on the service until they expire or are ended.

const STORE = "corolla.sessions";

/**
 * One session: `{id, title, turns}`. `id` is the service's name for the session that has all the turns; null: there is
 * none; "": this key may make no sessions, so that the whole conversation is sent each time. Turns are
 * `{role, text, note}`.
 */
export class Conversations {
  constructor() {
    this.all = read();
    if (!this.all.length) this.begin();
    this.current = this.all[0];
  }

  /** A new one, which is the current one then. */
  begin() {
    const empty = this.all?.find((each) => !each.turns.length);
    this.current = empty ?? { id: null, title: "New session", turns: [] };
    if (!empty) this.all.unshift(this.current);
  }

  /** Forgets one of them. */
  remove(conversation) {
    this.all = this.all.filter((each) => each !== conversation);
    if (!this.all.length) this.begin();
    if (this.current === conversation) this.current = this.all[0];
    this.store();
  }

  /** Adds a turn. The first one names the session. */
  add(conversation, turn) {
    if (!conversation.turns.length) conversation.title = turn.text.slice(0, 60);
    conversation.turns.push(turn);
    this.store();
  }

  store() {
    try {
      sessionStorage.setItem(STORE, JSON.stringify(this.all.filter((each) => each.turns.length)));
    } catch {
      // The tab's storage is full: they are there until it closes or is loaded again.
    }
  }
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    return [];
  }
}
