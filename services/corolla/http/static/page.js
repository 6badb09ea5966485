// Puts the page together.
import { ChatView } from "./chat_view.js";
import { byId } from "./elements.js";
import { ModelView } from "./model_view.js";
import { Service } from "./service.js";

const PAUSES_MS = [500, 1000, 2000, 5000];

const service = new Service();
const view = new ModelView();

function askForKey(problem) {
  byId("key-form").hidden = false;
  byId("key-refused").textContent = problem;
  if (problem) byId("key").focus();
}

service.onKeyWanted = (isRefused) => askForKey(isRefused ? "The service does not take this key." : "");
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  service.key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("message").focus();
});

/** Watches the placement while somebody looks at the page. */
async function watch() {
  for (let attempt = 0; ; attempt += 1) {
    await visible();
    const away = new AbortController();
    const leave = () => document.hidden && away.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      for await (const placement of service.watch("GET", "v1/placement", undefined, away.signal)) {
        attempt = 0;
        tell("live");
        view.show(placement);
      }
    } catch (failure) {
      if (failure.status === 401 || failure.status === 403) {
        if (failure.status === 403) askForKey("This key is for another model.");
        tell("locked", "a key is wanted");
        await service.keyGiven();
        continue;
      }
      if (!away.signal.aborted) tell("away", "connecting again");
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(attempt, PAUSES_MS.length - 1)]));
  }
}

function visible() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

function tell(state, text = state) {
  const shown = byId("connection");
  if (shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.textContent = text;
}

new ChatView(service);
watch();
