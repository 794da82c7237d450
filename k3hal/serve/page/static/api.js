// The server's answers: JSON, server-sent events however the bytes are cut, and errors as one class.

/** What went wrong, in the server's words where it has some. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", code = "", param = "", retryAfter = "", requestId = "" } = {}) {
    super(message);
    Object.assign(this, { status, type, code, param, retryAfter, requestId });
  }
}

/** The `data` of each event, as bytes are fed in. Comments and other fields are left out. */
export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  feed(bytes) {
    const lines = (this.#rest + this.#decoder.decode(bytes, { stream: true })).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return events;
  }
}

export async function getJson(path) {
  const response = await reach(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (!response.ok) throw await refusal(response);
  try {
    return await response.json();
  } catch {
    throw new ApiError(`${path}: the answer is not JSON.`, { status: response.status });
  }
}

/** The chunks of a streamed chat. Throws `ApiError`, also where the stream breaks off. `body` is JSON text. */
export async function* chat(body, key, signal) {
  const response = await reach("v1/chat/completions", { method: "POST", headers: headersWith(key), body, signal });
  if (!response.ok) throw await refusal(response);
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      for (const data of parser.feed(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw fromBody(chunk.error, response, 200);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    if (error instanceof SyntaxError) throw new ApiError("A part of the answer is not JSON.");
    throw new ApiError("The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {}); // its stream may have failed already, which was reported above
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

function headersWith(key) {
  const headers = new Headers({ "Content-Type": "application/json" });
  try {
    if (key) headers.set("Authorization", `Bearer ${key}`);
  } catch {
    throw new ApiError("The API key has characters that no header can carry.", { status: 401 });
  }
  return headers;
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
}

async function refusal(response) {
  let body = null;
  try {
    body = (await response.json()).error;
  } catch {
    // A proxy between here and the server answers in its own words.
  }
  if (typeof body?.message !== "string") body = { message: `The server answered ${response.status} without a reason.` };
  return fromBody(body, response, response.status);
}

function fromBody(error, response, status) {
  return new ApiError(String(error.message), {
    status,
    type: error.type ?? "",
    code: error.code ?? "",
    param: error.param ?? "",
    retryAfter: response.headers.get("Retry-After") ?? "",
    requestId: response.headers.get("X-Request-Id") ?? "",
  });
}
