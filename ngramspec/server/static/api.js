// Requests to the server and the events of their answers. Knows nothing of the page.

export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** What the server runs: see playground.py's Config. Throws ApiError. */
export async function getConfig(key) {
  return (await send("playground/config", { headers: headers(key) })).json();
}

/** The JSON events of a streamed answer, one by one. Throws ApiError; AbortError where `signal` says so. */
export async function* stream(path, body, key, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message || "The server ended the answer with an error.");
    yield event;
  }
  throw new ApiError("The connection ended before the answer did.");
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const seconds = Number.parseInt(response.headers.get("retry-after"), 10);
  throw new ApiError(error?.message || `The server answered ${response.status}.`, response.status, seconds >= 0 ? seconds : null);
}

/** The data of each server-sent event of a byte stream. */
async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/); // a CR at the very end may be half of a CR LF
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // left early: the server need not go on
  }
}
