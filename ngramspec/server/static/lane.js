// One answer on the page: its text token by token, where they came from, its figures. Knows nothing of requests or the form.

import { SOURCES, kind } from "./sources.js";

const WIDEST = 16; // columns of the histogram; longer drafts share the last

/** Numbers as a person reads them: three digits that say something. */
export function seconds(s) {
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

export class Lane {
  /** `inspect(lane, index, element)` is called when a token is pointed at or focused; `note` stands below the answer. */
  constructor(title, note, inspect) {
    const root = document.getElementById("lane").content.cloneNode(true).firstElementChild;
    this.element = root;
    this.tokens = []; // { text, source, start }, shown or about to be
    this.text = "";
    this.sources = false; // whether the server says where tokens came from
    this.finished = false;
    this.usage = null;
    this.metrics = null;
    this.finishReason = null;
    this._inspect = inspect;
    this._note = note;
    this._shown = 0;
    this._frame = 0;
    this._started = performance.now();
    this._first = 0;
    this._firstTokens = 0;
    this._ended = 0;
    this._box = root.querySelector(".text");
    root.querySelector("h2").textContent = title;
    this._box.setAttribute("aria-label", `${title}: the answer. Arrow keys go from token to token.`);
    this._box.setAttribute("aria-busy", "true");
    this._box.addEventListener("pointerover", (event) => this._point(event.target));
    this._box.addEventListener("click", (event) => this._point(event.target));
    this._box.addEventListener("focusin", (event) => this._focused(event.target));
    this._box.addEventListener("keydown", (event) => this._key(event));
  }

  /** Takes one event of a stream, of either route. */
  add(event) {
    const now = performance.now();
    this.usage = event.usage ?? this.usage;
    this.metrics = event.metrics?.speculative_decoding ?? this.metrics;
    for (const choice of event.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? "";
      const tokens = choice.ngramspec?.tokens;
      this.sources ||= Boolean(tokens);
      for (const token of tokens ?? (text ? [{ text, source: null }] : [])) {
        this.tokens.push({ text: token.text, source: token.source, start: this.text.length });
        this.text += token.text;
      }
      if (this.tokens.length && !this._first) [this._first, this._firstTokens] = [now, this.tokens.length];
      if (choice.finish_reason) [this.finishReason, this._ended] = [choice.finish_reason, now];
    }
    this._frame ||= requestAnimationFrame(() => this._draw());
  }

  /** The stream is over: with the whole answer, or `interrupted` by this sentence. */
  end(interrupted = "") {
    this._ended ||= performance.now();
    this.finished = !interrupted;
    cancelAnimationFrame(this._frame);
    this._draw();
    this._box.removeAttribute("aria-busy");
    const why = { stop: "Ended by itself.", length: "Ended at the token limit.", cancelled: "Cancelled by the server." };
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const prompt = this.usage ? ` ${this.usage.prompt_tokens} prompt tokens${cached ? `, ${cached} of them from the prefix cache` : ""}.` : "";
    this.element.querySelector(".ending").textContent =
      (interrupted || why[this.finishReason] || "") + (this.text ? "" : " The answer is empty.") + prompt + this._note;
    this._drawLengths();
  }

  get seconds() {
    return ((this._ended || performance.now()) - this._started) / 1000;
  }

  get count() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  // ---------------------------------------------------------------- drawing

  _draw() {
    this._frame = 0;
    const fresh = document.createDocumentFragment();
    for (; this._shown < this.tokens.length; this._shown++) {
      const { text, source } = this.tokens[this._shown];
      if (!text) continue; // part of a character that a later token completes
      const span = document.createElement("span");
      span.textContent = text;
      span.className = this.sources ? `tok src-${kind(source)}` : "tok";
      if (text.startsWith("\n")) span.classList.add("break");
      span.dataset.index = this._shown;
      if (this.sources) span.tabIndex = -1;
      fresh.append(span);
    }
    this._box.append(fresh);
    this._drawStats();
    if (this.sources) this._drawLegend();
  }

  _drawStats() {
    const elapsed = ((this._ended || performance.now()) - this._first) / 1000;
    const later = this.tokens.length - this._firstTokens;
    const passes = this._passes();
    const known = this._first > 0 && (this.sources || this.usage); // without sources a stream says pieces, not tokens
    this._put("rate", known && later > 0 && elapsed > 0 ? (((this.count - this._firstTokens) / elapsed).toFixed(1)) : "–");
    this._put("per_pass", known && passes > 0 ? (this.count / passes).toFixed(2) : "–");
    this._put("tokens", known ? String(this.count) : "–");
    this._put("first", this._first ? seconds((this._first - this._started) / 1000) : "–");
    this._put("total", this._ended ? seconds(this.seconds) : "–");
  }

  _put(name, value) {
    this.element.querySelector(`[data-stat="${name}"]`).textContent = value;
  }

  /** Passes of the model: each writes one token of its own behind what it accepted, but for a last one that was cut. */
  _passes() {
    if (this.sources) {
      return this.tokens.filter((token) => token.source === null).length + (this.tokens.at(-1)?.source != null ? 1 : 0);
    }
    return this.metrics ? this.count - this.metrics.num_accepted_draft_tokens : 0;
  }

  _drawLegend() {
    const counts = new Map();
    for (const { source } of this.tokens) counts.set(kind(source), (counts.get(kind(source)) ?? 0) + 1);
    const legend = this.element.querySelector(".legend");
    for (const name of Object.keys(SOURCES)) {
      if (!counts.has(name)) continue;
      let item = legend.querySelector(`[data-source="${name}"]`);
      if (!item) {
        item = document.createElement("li");
        item.dataset.source = name;
        item.title = SOURCES[name].says;
        const [label, count] = [document.createElement("span"), document.createElement("b")];
        label.className = `tok src-${name}`;
        label.textContent = SOURCES[name].name;
        item.append(label, " ", count);
      }
      legend.append(item); // in the order of SOURCES, whichever came first
      item.querySelector("b").textContent = counts.get(name);
    }
  }

  _drawLengths() {
    const longest = this.metrics?.acceptance_histogram.findLastIndex((n) => n > 0) ?? -1;
    if (longest < 0) return;
    const columns = this.metrics.acceptance_histogram.slice(0, Math.min(longest + 1, WIDEST));
    if (longest >= WIDEST) columns.push(this.metrics.acceptance_histogram.slice(WIDEST).reduce((a, b) => a + b));
    const most = Math.max(...columns);
    const bars = columns.map((n, accepted) => {
      const [item, count, bar, label] = ["li", "span", "span", "span"].map((tag) => document.createElement(tag));
      const name = accepted === WIDEST ? `${accepted}+` : String(accepted);
      [count.className, bar.className, label.className] = ["count", "bar", "of"];
      [count.textContent, label.textContent] = [n || "", name];
      bar.style.setProperty("--share", n / most);
      item.setAttribute("aria-label", `${name} accepted: ${n} passes`);
      item.append(count, bar, label);
      return item;
    });
    const { num_draft_tokens: drafted, num_accepted_draft_tokens: accepted, num_spec_steps: steps } = this.metrics;
    this.element.querySelector(".bars").replaceChildren(...bars);
    this.element.querySelector(".lengths .hint").textContent =
      `${steps} passes had a draft; of ${drafted} drafted tokens ${accepted} were accepted.`;
    this.element.querySelector(".lengths").hidden = false;
  }

  // ---------------------------------------------------------------- pointing at tokens

  _point(target) {
    if (this.sources && target.dataset.index) this._inspect(this, Number(target.dataset.index), target);
  }

  _focused(target) {
    if (target === this._box) {
      if (this.sources) (this._box.querySelector('[tabindex="0"]') ?? this._box.firstElementChild)?.focus();
      return;
    }
    for (const old of this._box.querySelectorAll('[tabindex="0"]')) old.tabIndex = -1;
    this._box.tabIndex = -1; // one stop for the Tab key: the token that was last looked at
    target.tabIndex = 0;
    this._point(target);
  }

  _key(event) {
    const at = event.target;
    if (!at.dataset.index || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this._box.lastElementChild;
    const same = (a, b) => a.className.replace(" break", "") === b.className.replace(" break", "");
    const run = (step) => {
      let next = at;
      while (next[step] && same(next, at)) next = next[step];
      return next;
    };
    const next = {
      ArrowRight: () => at.nextElementSibling,
      ArrowLeft: () => at.previousElementSibling,
      ArrowDown: () => run("nextElementSibling"),
      ArrowUp: () => run("previousElementSibling"),
      Home: () => this._box.firstElementChild,
      End: () => last,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next()?.focus();
  }
}
