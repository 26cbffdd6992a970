// Names and explanations of the sources that drafts come from, and where in earlier text a token was seen. Touches no page.

export const SOURCES = {
  model: { name: "the model itself", says: "No draft had it, so it cost a pass." },
  ngram: { name: "this text", says: "The same words stand earlier in the prompt or the output." },
  datastore: { name: "datastore", says: "The datastore's files go on like this." },
  prediction: { name: "expected output", says: "The expected output goes on like this." },
  similar: { name: "similar file", says: "From the datastore's files that are most like the prompt." },
  answers: { name: "earlier answer", says: "An answer that was given before goes on like this." },
  recycled: { name: "own candidates", says: "What the model itself thought likely when these words last occurred." },
  syntax: { name: "syntax", says: "Source code usually goes on like this." },
  other: { name: "other drafter", says: "From a further source that the server was started with." },
};

/** Which of SOURCES a token's source is: null is the model's own. */
export function kind(source) {
  if (source === null) return "model";
  const name = source.split(":", 1)[0];
  return name in SOURCES ? name : "other";
}

/** The part of a source behind its name: the file and line of a datastore's token, a further drafter's name. */
export function place(source) {
  if (source === null) return "";
  return kind(source) === "other" ? source : source.slice(source.split(":", 1)[0].length + 1);
}

/**
 * Where `token` stands in `text` behind most of the words that precede it here (`before`): { line, head, match, tail }, the parts
 * of its line there, or null. Longer contexts occur in fewer places, so the longest is found by doubling and halving.
 */
export function lastSeen(text, before, token) {
  const find = (n) => text.lastIndexOf(before.slice(before.length - n) + token);
  if (!token || find(0) < 0) return null;
  let low = 0;
  let high = 1;
  while (high <= before.length && high <= 4096 && find(high) >= 0) [low, high] = [high, high * 2];
  high = Math.min(high, before.length + 1, 4097);
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (find(middle) >= 0) low = middle;
    else high = middle;
  }
  const at = find(low) + low;
  const start = Math.max(text.lastIndexOf("\n", at - 1) + 1, at - 48);
  const end = text.indexOf("\n", at + token.length);
  return {
    at,
    line: text.slice(0, at).split("\n").length,
    head: text.slice(start, at),
    match: token,
    tail: text.slice(at + token.length, Math.min(end < 0 ? text.length : end, at + token.length + 32)),
  };
}
