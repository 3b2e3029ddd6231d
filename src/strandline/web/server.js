// Calls to the server: JSON, the token, deadlines, and errors in words.

const DEADLINE_MS = 15_000;
const GIVE_UP_MS = 30_000;
const STORED = "strandline-token";

/** The server answered, and refused. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Nobody answered. */
export class Unreachable extends Error {}

/** Takes a token out of the address: `#token=…`, alone or after a `&`. */
export function takeTokenFromAddress() {
  const found = /(^#|[#&])token=([^&]*)/.exec(location.hash);
  if (!found) return;
  keepToken(decodeURIComponent(found[2]));
  const rest = location.hash.slice(1).split("&").filter((part) => part && !part.startsWith("token=")).join("&");
  history.replaceState(null, "", location.pathname + location.search + (rest ? "#" + rest : ""));
}

export function keepToken(token) {
  if (token) sessionStorage.setItem(STORED, token);
  else sessionStorage.removeItem(STORED);
}

export function hasToken() {
  return sessionStorage.getItem(STORED) !== null;
}

async function call(method, path, body) {
  const headers = { Accept: "application/json" };
  const token = sessionStorage.getItem(STORED);
  if (token) headers.Authorization = "Bearer " + token;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(DEADLINE_MS),
    });
  } catch (error) {
    throw new Unreachable(error.name === "TimeoutError" ? "no answer within 15 seconds" : "no connection");
  }
  return response;
}

async function answered(response) {
  let content;
  try {
    content = await response.json();
  } catch {
    if (response.ok) throw new Unreachable("the answer broke off");
    content = null;
  }
  if (!response.ok) throw new Refused(response.status, wordsOf(content) ?? "The server answered " + response.status + ".");
  return content;
}

function wordsOf(content) {
  const errors = content?.errors ?? content?.detail;
  if (typeof errors === "string") return errors;
  if (!Array.isArray(errors) || !errors.length) return null;
  return errors.map((one) => (typeof one === "string" ? one : one?.msg ?? JSON.stringify(one))).join("\n");
}

export async function get(path) {
  return answered(await call("GET", path));
}

/** A GET whose headers are wanted, too. */
export async function getWithHeaders(path) {
  const response = await call("GET", path);
  return [await answered(response), response.headers];
}

export async function send(method, path, body) {
  return answered(await call(method, path, body));
}

const part = encodeURIComponent;

/** The path of a job, and of what is below it: `ofJob(id, "logs", "slot-0")`. */
export function ofJob(id, ...parts) {
  return ["jobs", id, ...parts].map((one, index) => (index === 0 ? one : part(one))).join("/");
}

/** Starts a change and waits for its end. `progress` gets words meanwhile. Returns the operation; a failure is thrown. */
export async function trigger(method, path, body, pollPath, progress) {
  const started = await send(method, path, body);
  const id = started?.["request-id"];
  if (!id) return started ?? {};
  let heard = Date.now();
  for (;;) {
    await new Promise((done) => setTimeout(done, 400));
    let answer;
    try {
      answer = await get(pollPath(id));
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      if (Date.now() - heard > GIVE_UP_MS) throw error;
      progress("The server does not answer (" + error.message + "). Asking again …");
      continue;
    }
    heard = Date.now();
    if (answer.status?.id === "COMPLETED") return failed(answer.operation ?? {});
    progress(answer.progress ?? "");
  }
}

function failed(operation) {
  const cause = operation["failure-cause"];
  if (!cause) return operation;
  const text = typeof cause === "string" ? cause : cause["stack-trace"] ?? cause.class ?? JSON.stringify(cause);
  throw new Refused(500, text);
}
