// The page's form and its runs: what is asked, one after the other, and what came of it. Drawing an answer is lane.js's business.

import { ApiError, getConfig, stream } from "./api.js";
import { Lane, seconds } from "./lane.js";
import { SOURCES, kind, lastSeen, place } from "./sources.js";

const $ = (id) => document.getElementById(id);
const ROUTES = { completion: "v1/completions", chat: "v1/chat/completions" };
const TITLES = { draft: "With speculation", plain: "Without, one token a pass" };
const POINT = "class Point:\n    def __init__(self, x, y, z):\n        self.x = x\n        self.y = y\n        self.z = z\n";
const EXAMPLES = {
  pattern: {
    mode: "completion",
    prompt: `${POINT}\n    def get_x(self):\n        return self.x\n\n    def set_x(self, x):\n        self.x = x\n\n    def get_y(self):`,
  },
  edit: {
    mode: "chat",
    prompt: `Rename the class to Vector. Answer with the whole code and nothing else.\n\n${POINT}`,
    prediction: POINT,
  },
  prose: { mode: "completion", prompt: "The lighthouse keeper had not spoken to anyone for a month when" },
};

let config = null;
let running = null; // the AbortController of the run that is under way
let lanes = {}; // draft and plain, as far as they were run
let asked = null; // { path, body, seed } of the draft lane
let retry = () => {};

// -------------------------------------------------------------------- what the server runs

async function connect() {
  $("problem").hidden = true;
  try {
    config = await getConfig(apiKey());
  } catch (error) {
    $("server").textContent = error.status === 401 ? "This server wants an API key." : "Not connected.";
    fail(error, connect);
    return;
  }
  $("server").textContent = `${config.model}, ${config.exactness === "bitwise" ? "bit for bit exact" : "exact up to rounding"}`;
  $("max_tokens").max = config.max_tokens;
  $("max_tokens").value = Math.min($("max_tokens").value, config.max_tokens);
  $("no-chat").hidden = config.chat;
  document.querySelector('[value="chat"]').disabled = !config.chat;
  document.querySelector('[data-example="edit"]').disabled = !config.chat;
  $("no-sources").hidden = config.sources;
  $("stores").hidden = config.datastores.length === 0;
  $("store-list").replaceChildren(
    ...config.datastores.map((name) => {
      const [label, box] = [document.createElement("label"), document.createElement("input")];
      Object.assign(box, { type: "checkbox", defaultChecked: !config.hidden.includes(name), value: name, name: "datastore" });
      label.append(box, ` ${name}`);
      return label;
    }),
  );
}

function apiKey() {
  return $("key").value.trim();
}

function useKey() {
  store(sessionStorage, "ngramspec.key", apiKey());
  connect();
}

// -------------------------------------------------------------------- the form

function mode() {
  return document.querySelector('[name="mode"]:checked').value;
}

/** The request that the form describes, but for its seed: { path, body, seed }. */
function readForm() {
  const prompt = $("prompt").value;
  const prediction = $("prediction").value;
  const chat = mode() === "chat";
  const body = {
    model: config.model,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("max_tokens").value),
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    speculative_metrics: config.sources ? "detailed" : "summary",
    cache_prompt: false, // else the second run of a comparison would find its prompt computed by the first
  };
  if (config.sources) body.return_sources = true;
  const stops = $("stop-strings").value.split("\n").filter(Boolean).map(unescaped);
  if (stops.length) body.stop = stops;
  if (prediction) body.prediction = chat ? { type: "content", content: prediction } : prediction;
  const boxes = [...document.querySelectorAll('[name="datastore"]')];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  if (boxes.some((box) => box.checked !== box.defaultChecked)) body.datastore = chosen;
  return { path: ROUTES[mode()], body, seed: $("seed").value };
}

function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}

function fill({ mode: kindOf, prompt, prediction = "" }) {
  document.querySelector(`[name="mode"][value="${kindOf}"]`).checked = true;
  $("prompt").value = prompt;
  $("prediction").value = prediction;
  $("prediction-box").open = Boolean(prediction);
  showMode();
}

function showMode() {
  $("prompt-label").textContent = mode() === "chat" ? "Message" : "Text to continue";
}

// -------------------------------------------------------------------- runs

/** Runs the form's request; with `compare` also without speculation, of which only what is missing is run. */
async function go(compare) {
  if (running) return;
  if (!config) return void connect();
  if (!$("form").reportValidity()) return;
  const request = readForm();
  const again = compare && lanes.draft?.finished && !lanes.plain && JSON.stringify(request) === JSON.stringify(asked);
  running = new AbortController();
  setRunning(true);
  try {
    if (!again) {
      asked = request;
      lanes = {};
      $("lanes").replaceChildren();
      // Both texts of a comparison are drawn with one seed.
      const seed = request.seed === "" ? Math.floor(Math.random() * 2 ** 32) : Number(request.seed);
      await run("draft", { ...request.body, seed });
      lanes.draft.seed = seed;
    }
    if (compare) {
      await run("plain", { ...request.body, seed: lanes.draft.seed, speculation: false });
      judge();
    } else say(`Finished: ${lanes.draft.count} tokens in ${seconds(lanes.draft.seconds)}.`);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else fail(error, () => go(compare));
  } finally {
    running = null;
    setRunning(false);
  }
}

async function run(name, body) {
  const lane = (lanes[name] = new Lane(TITLES[name], body.temperature > 0 ? ` Seed ${body.seed}.` : "", inspect));
  $("lanes").append(lane.element);
  $("lanes").classList.toggle("pair", name === "plain");
  say(name === "draft" ? "Running…" : "Running without speculation…");
  try {
    for await (const event of stream(asked.path, body, apiKey(), running.signal)) lane.add(event);
    lane.end();
  } catch (error) {
    lane.end(error.name === "AbortError" ? "Stopped." : "Broken off.");
    if (!lane.text && error instanceof ApiError) {
      lane.element.remove();
      delete lanes[name];
    }
    if (error.status === 403 && body.return_sources) {
      Object.assign(config, { sources: false });
      $("no-sources").hidden = false;
      const { return_sources: _, ...rest } = body;
      return run(name, { ...rest, speculative_metrics: "summary" });
    }
    throw error;
  }
}

function judge() {
  const { draft, plain } = lanes;
  const same = draft.text === plain.text;
  const factor = plain.seconds / draft.seconds;
  let at = 0;
  while (!same && draft.text[at] === plain.text[at]) at++;
  const reason = config.exactness === "bitwise" ? "this must not happen, please report it" : "this machine is exact only up to rounding";
  const pace = `${(factor >= 1 ? factor : 1 / factor).toFixed(2)} times as ${factor >= 1 ? "fast" : "slow"} with speculation.`;
  const answers = draft.tokens.filter((token) => kind(token.source) === "answers").length;
  $("badge").textContent = same ? "Identical" : "Different";
  $("verdict").classList.toggle("differs", !same);
  $("verdict-text").textContent =
    (same ? "" : `From character ${at + 1} on: ${reason}. `) + pace + (answers ? ` ${answers} tokens were known from an earlier answer.` : "");
  const longest = Math.max(draft.seconds, plain.seconds);
  for (const [name, lane] of Object.entries(lanes)) {
    $(`time-${name}`).textContent = seconds(lane.seconds);
    $(`time-${name}`).style.setProperty("--share", lane.seconds / longest);
  }
  $("verdict").dataset.factor = factor.toFixed(3);
  $("verdict").hidden = false;
  say(`Compared: ${same ? "identical" : "different"} texts, in ${seconds(draft.seconds)} and ${seconds(plain.seconds)}.`);
}

function setRunning(on) {
  $("run").setAttribute("aria-disabled", on);
  $("compare").setAttribute("aria-disabled", on);
  $("stop").setAttribute("aria-disabled", !on);
  document.body.classList.toggle("running", on);
  if (!on) return;
  $("problem").hidden = $("verdict").hidden = $("empty").hidden = $("inspector").hidden = true;
  $("lanes").hidden = false;
  if (matchMedia("(max-width: 60rem)").matches) $("results").scrollIntoView(); // the form stands above it
}

function stop() {
  running?.abort();
}

function say(text) {
  $("status").textContent = text;
}

function fail(error, again) {
  const wait = error.retryAfter == null ? "" : ` Try again in ${error.retryAfter} s.`;
  const told = error.status === 429 ? `The server is busy: ${error.message}` : error.message[0].toUpperCase() + error.message.slice(1);
  $("problem-text").textContent = told.replace(/\.?$/, ".") + wait;
  $("problem").hidden = false;
  say("");
  retry = again;
  if (error.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
  if (!(error instanceof ApiError)) throw error; // a fault of this page: the console has it too
}

// -------------------------------------------------------------------- one token, looked at

function inspect(lane, index, element) {
  const { text, source, start } = lane.tokens[index];
  const name = kind(source);
  const label = document.createElement("span");
  label.className = `tok src-${name}`;
  label.textContent = SOURCES[name].name;
  const quoted = document.createElement("code");
  quoted.textContent = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  $("inspector-source").replaceChildren(`Token ${index + 1} `, quoted, " from ", label);
  $("inspector-where").textContent = place(source) || SOURCES[name].says;
  $("inspector-context").replaceChildren(...(source === null ? [] : context(lane, text, name, start)));
  $("inspector").hidden = false;
  for (const old of document.querySelectorAll('[aria-describedby="inspector"]')) old.removeAttribute("aria-describedby");
  element.setAttribute("aria-describedby", "inspector");
}

/** The earlier text that is most like the token's own surroundings, where the source is one that this page knows the text of. */
function context(lane, text, name, start) {
  const { body } = asked;
  const prompt = body.prompt ?? body.messages[0].content;
  const before = prompt + lane.text.slice(0, start);
  const expected = body.prediction?.content ?? body.prediction ?? "";
  const [searched, title] = name === "prediction" ? [expected, "Expected output"] : name === "ngram" ? [before, "Prompt"] : ["", ""];
  const seen = lastSeen(searched, before, text);
  if (!seen) return [];
  const inOutput = name === "ngram" && seen.at >= prompt.length;
  const line = inOutput ? lane.text.slice(0, seen.at - prompt.length).split("\n").length : seen.line;
  const mark = document.createElement("mark");
  mark.textContent = seen.match.replaceAll("\n", "↵");
  const code = document.createElement("code");
  code.append(seen.head, mark, seen.tail);
  return [`${inOutput ? "Output" : title}, line ${line}: `, code];
}

// -------------------------------------------------------------------- colours, keys, start

function dark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

function showTheme() {
  $("theme").textContent = dark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `${dark() ? "Light" : "Dark"} colours`);
}

function switchTheme() {
  const theme = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  store(localStorage, "ngramspec.theme", theme);
  showTheme();
}

function store(storage, name, value) {
  try {
    storage.setItem(name, value);
  } catch {
    // storage is switched off: it holds for this page only
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  go(false);
});
$("form").addEventListener("change", showMode);
$("compare").addEventListener("click", () => go(true));
$("stop").addEventListener("click", stop);
$("again").addEventListener("click", () => retry());
$("key-use").addEventListener("click", useKey);
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  useKey();
});
$("theme").addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
for (const button of document.querySelectorAll("[data-example]")) button.addEventListener("click", () => fill(EXAMPLES[button.dataset.example]));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    stop();
    $("inspector").hidden = true;
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    go(event.shiftKey);
  }
});

try {
  $("key").value = sessionStorage.getItem("ngramspec.key") ?? "";
} catch {
  // storage is switched off
}
showTheme();
showMode();
connect();
