// JSON as text: laid out over lines without touching a literal, which a parser would (1.0, 12345678901234567890).

export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** `text` indented by two spaces if it is JSON, else as it is. */
export function indented(text) {
  if (!isJson(text)) return text;
  let out = "";
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|[^\s"[\]{},:]+|[[\]{},:]/g)) {
    if (token === "{" || token === "[") {
      depth += 1;
      out += token + line();
    } else if (token === "}" || token === "]") {
      depth -= 1;
      out = /[{[]\s*$/.test(out) ? out.trimEnd() + token : out + line() + token;
    } else if (token === ",") out += token + line();
    else out += token === ":" ? ": " : token;
  }
  return out;
}

/** Tools as the user typed them: null for none. Throws an `Error` that says what is wrong. */
export function checkedTools(text) {
  if (!text.trim()) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON (${error.message})`);
  }
  if (!Array.isArray(value)) throw new Error("Tools: a JSON list of tools is needed, as in the API's field “tools”");
  return value;
}
