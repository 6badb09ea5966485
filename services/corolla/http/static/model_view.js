// The model as a row of blocks, who holds them, how the servers are, and what was recovered.
import { byId, element, show } from "./elements.js";
import { holdersOf, runsOf } from "./holders.js";

const MOVED_MS = 4500;
const count = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en", { timeStyle: "medium", hour12: false });
const CAUSES = {
  hop_unavailable: "was lost",
  hop_late: "was late",
  hop_leaving: "left",
  idle: "had forgotten the session",
  hop_session_lost: "had lost the session",
  non_finite: "computed nonsense",
  step_failed: "failed",
  out_of_memory: "had no memory left",
};

/** Blocks as people write them. */
export const blocksText = (first, end) => (end - first === 1 ? `block ${first}` : `blocks ${first}–${end - 1}`);

export class ModelView {
  #holders = [];
  #lastRecovery = null;
  #blocks = byId("blocks");

  /** Shows a placement. */
  show(placement) {
    const before = this.#holders;
    this.#holders = holdersOf(placement, before);
    const runs = runsOf(this.#holders);
    byId("model-name").textContent = placement.model;
    document.title = `${placement.model} · Corolla`;
    this.#showBlocks(placement, runs, before);
    this.#showRuns(placement, runs);
    this.#showCoverage(placement, runs);
    this.#showServers(placement);
    this.#showRecoveries(placement.recoveries);
    this.#flashRecovered(placement.recoveries);
  }

  #showBlocks(placement, runs, before) {
    this.#blocks.style.setProperty("--blocks", placement.num_blocks);
    const busy = new Set(placement.servers.filter((server) => server.answers).map((server) => server.name));
    const tones = runs.flatMap((run, number) => Array(run.end - run.first).fill(number % 3));
    show(this.#blocks, this.#holders.keys(), (block) => block, makeBlock, (made, block) => {
      const holder = this.#holders[block];
      made.dataset.holder = holder ?? "";
      made.dataset.tone = tones[block];
      made.dataset.busy = busy.has(holder);
      made.title = `block ${block}: ${holder ?? "nobody"}`;
      if (holder !== null && before.length && before[block] !== holder) flash(made);
    });
  }

  #showRuns(placement, runs) {
    const list = byId("holders");
    list.style.setProperty("--blocks", placement.num_blocks);
    const spares = ({ first, end, holder }) =>
      placement.servers.filter((server) => server.name !== holder && server.state === "ready"
        && server.blocks[0] <= first && end <= server.blocks[1]).length;
    show(list, runs, (run) => run.first, () => element("li", {}, element("b"), element("span"), element("i")), (made, run) => {
      made.style.gridColumn = `${run.first + 1} / ${run.end + 1}`;
      const [name, blocks, spare] = made.children;
      name.textContent = run.holder ?? "nobody";
      blocks.textContent = blocksText(run.first, run.end);
      const number = spares(run);
      spare.textContent = run.holder === null ? "a server is wanted" : number ? `${number} more could take over` : "";
      made.dataset.holder = run.holder ?? "";
    });
  }

  #showCoverage(placement, runs) {
    const held = this.#holders.filter((holder) => holder !== null).length;
    const answers = Math.max(0, ...placement.servers.map((server) => server.answers));
    const now = `${answers || "no"} ${answers === 1 ? "answer" : "answers"} under way`;
    byId("coverage").textContent = `${held} of ${placement.num_blocks} have a server, ${now}`;
    const parts = runs.map((run) => `${blocksText(run.first, run.end)}: ${run.holder ?? "nobody"}`);
    this.#blocks.setAttribute("aria-label", `${placement.num_blocks} blocks. ${parts.join("; ")}`);
  }

  #showServers(placement) {
    const tones = new Map(runsOf(this.#holders).map((run, number) => [run.holder, number % 3]));
    show(byId("server-rows"), placement.servers, (server) => server.name, makeServer, (row, server) => {
      row.dataset.state = server.state;
      row.dataset.tone = tones.get(server.name) ?? "none";
      const [name, answers, sessions, free, batch, step] = row.children;
      const [, title, blocks] = name.children;
      title.textContent = server.name;
      const [span, state] = blocks.children;
      span.textContent = blocksText(...server.blocks);
      state.textContent = stateOf(server);
      answers.textContent = server.answers;
      sessions.textContent = server.sessions;
      const [share, meter] = free.children;
      share.textContent = server.pages ? `${Math.floor((100 * server.free_pages) / server.pages)} %` : "–";
      free.title = `${count.format(server.free_pages)} of ${count.format(server.pages)} pages`;
      meter.style.setProperty("--share", server.pages ? server.free_pages / server.pages : 0);
      batch.textContent = server.batch_rows ? server.batch_rows.toFixed(1) : "–";
      step.textContent = server.step_seconds ? `${(server.step_seconds * 1000).toFixed(1)}` : "–";
    });
  }

  #showRecoveries(recoveries) {
    byId("no-recoveries").hidden = recoveries.length > 0;
    show(byId("recoveries"), [...recoveries].reverse(), (each) => each.number, makeRecovery, (made, each) => {
      const [head, body] = made.children;
      head.textContent = `${clock.format(each.time * 1000)}, after ${each.seconds.toFixed(2)} s`;
      const whose = each.answers === 1 ? "1\u00a0answer goes on" : `${each.answers}\u00a0answers go on`;
      body.textContent = `${sentenceOf(each)} ${whose}, and not a token changes.`;
    });
  }

  #flashRecovered(recoveries) {
    const newest = recoveries.at(-1)?.number ?? 0;
    const fresh = recoveries.filter((each) => this.#lastRecovery !== null && each.number > this.#lastRecovery);
    this.#lastRecovery = newest;
    for (const { blocks: [first, end] } of fresh.flatMap((each) => each.moved))
      for (const made of [...this.#blocks.children].slice(first, end)) flash(made);
  }
}

function makeBlock(block) {
  const made = element("div", { className: "block" });
  made.style.setProperty("--block", block);
  return made;
}

function makeServer() {
  return element(
    "tr", {},
    element("th", { scope: "row" }, element("span", { className: "swatch" }), element("b"), element("small", {}, element("span"), " ", element("em"))),
    element("td"), element("td"),
    element("td", {}, element("span"), element("span", { className: "meter", "aria-hidden": "true" })),
    element("td"), element("td"),
  );
}

/** A server's state in words: how far it has come if it joins, what else it keeps, and which servers it does not reach. */
function stateOf(server) {
  const words = server.state === "ready" ? [] : [server.state];
  if (server.start_share) words.push(`${Math.floor(100 * server.start_share)}\u00a0%`);
  if (server.start_seconds_left) words.push(`${Math.ceil(server.start_seconds_left)}\u00a0s left`);
  if (server.spare_blocks?.length) words.push(`spare for ${server.spare_blocks.map((blocks) => blocksText(...blocks)).join(", ")}`);
  if (server.unreachable.length) words.push(`apart from ${server.unreachable.join(", ")}`);
  return words.join(", ");
}

const makeRecovery = () => element("li", {}, element("b"), element("p"));

function sentenceOf({ cause, moved }) {
  const what = CAUSES[cause] ?? "failed";
  if (!moved.length) return "The same servers filled their blocks again.";
  return moved.map(({ blocks, lost, found }) =>
    `${lost} ${what}: ${found} took ${blocksText(...blocks)}.`).join(" ");
}

function flash(made) {
  made.classList.remove("moved");
  void made.offsetWidth; // begins the animation anew
  made.classList.add("moved");
  setTimeout(() => made.classList.remove("moved"), MOVED_MS);
}
