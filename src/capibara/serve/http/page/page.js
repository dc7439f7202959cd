// The page of a server: a conversation, or texts that are continued, streamed from the server's own API.
// What a model says is only ever put into text nodes.

const at = (id) => document.getElementById(id);
const [log, form, text, statusLine] = [at("log"), at("form"), at("text"), at("status")];
const KEY = "capibara-key"; // in this tab, until it is closed
let info = { model: "Capibara", chat: true };
let messages = []; // {role, content}
let running = null; // AbortController of the answer that is being written

function inline(parent, content) {
  // `code` and **bold**; all else as it is.
  for (const part of content.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    const [tag, inner] = part.startsWith("`") && part.length > 2 ? ["code", part.slice(1, -1)]
      : part.startsWith("**") && part.length > 4 ? ["strong", part.slice(2, -2)] : [null, part];
    if (tag === null) parent.append(inner);
    else parent.append(Object.assign(document.createElement(tag), { textContent: inner }));
  }
}

function show(element, content) {
  const parts = content.split(/^```[^\n]*\n?/m);
  element.replaceChildren();
  parts.forEach((part, number) => {
    if (number % 2 === 0) {
      const block = document.createElement("p");
      inline(block, part.replace(/^\n+|(?<!\n)\n+$/g, number ? "" : "$&"));
      if (part.trim() || parts.length === 1) element.append(block);
      return;
    }
    const block = document.createElement("pre");
    block.append(Object.assign(document.createElement("code"), { textContent: part.replace(/\n$/, "") }));
    element.append(block);
    if (!navigator.clipboard) return; // a page from another machine by plain HTTP has none
    const copy = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
    copy.addEventListener("click", () => navigator.clipboard.writeText(part));
    element.append(copy);
  });
}

const root = document.documentElement;
const toEnd = () => { root.scrollTop = root.scrollHeight; };

function following(change) {
  // A reader at the end stays there; one who scrolled up is not taken away from what they read.
  const atEnd = root.scrollHeight - root.scrollTop - root.clientHeight < 40;
  change();
  if (atEnd) toEnd();
}

function paced(draw) {
  // Servers write faster than a long text is laid out: drawing takes a quarter of the time at most, so that Stop works.
  let [timer, pause] = [null, 0];
  const now = () => {
    clearTimeout(timer);
    timer = null;
    const begun = performance.now();
    draw();
    pause = 3 * (performance.now() - begun);
  };
  return { now, soon: () => { timer ??= setTimeout(now, Math.max(pause, 16)); } };
}

function article(role, content) {
  const made = document.createElement("article");
  made.className = role;
  const names = { user: "You", assistant: info.model, error: "The server" };
  const said = Object.assign(document.createElement("div"), { className: "said" });
  made.append(Object.assign(document.createElement("h2"), { textContent: names[role] ?? role }), said);
  show(said, content);
  following(() => log.append(made));
  return said;
}

function busy(is) {
  at("send").disabled = is;
  at("stop").hidden = !is;
  log.ariaBusy = String(is); // screen readers wait for the whole answer
  at("again").hidden = is || !messages.length;
  at("again").textContent = messages.at(-1)?.role === "user" ? "Try again" : "Answer again";
}

function request() {
  const body = { model: info.model, stream: true, stream_options: { include_usage: true } };
  const number = (id, name) => { if (at(id).value !== "") body[name] = Number(at(id).value); };
  number("temperature", "temperature");
  number("seed", "seed");
  number("most", "max_tokens");
  if (!info.chat) {
    if (!("max_tokens" in body)) body.max_tokens = null;
    body.prompt = messages.map((one) => one.content).join("");
    return ["v1/completions", body];
  }
  const system = at("system").value.trim();
  body.messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    const last = body.messages.at(-1);
    // What got no answer is asked together with what follows: many templates refuse two turns of a user.
    if (last?.role === role) last.content += `\n\n${content}`;
    else body.messages.push({ role, content });
  }
  return ["v1/chat/completions", body];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function wait(seconds, signal) {
  for (; seconds > 0 && !signal.aborted; --seconds) {
    statusLine.textContent = `The server is busy. Retrying in ${seconds} s.`;
    await new Promise((done) => {
      setTimeout(done, 1000);
      signal.addEventListener("abort", done, { once: true });
    });
  }
}

async function answer() {
  const mine = running = new AbortController();
  const { signal } = mine;
  busy(true);
  const said = article("assistant", "");
  toEnd();
  const message = { role: "assistant", content: "" };
  const [path, body] = request();
  messages.push(message);
  const drawing = paced(() => following(() => show(said, message.content)));
  let next = text;
  const begun = performance.now();
  let first = null;
  try {
    let response;
    for (;;) {
      statusLine.textContent = "";
      const key = at("key").value;
      const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
      response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
      if (response.status !== 429) break;
      await wait(Math.max(1, Number(response.headers.get("retry-after")) || 1), signal); // a proxy may send a date
      signal.throwIfAborted();
    }
    if (response.status === 401) {
      at("settings").open = true;
      next = at("key");
      throw new Error("This server wants an API key: put it into the settings.");
    }
    if (!response.ok) {
      const refusal = await response.json().catch(() => null); // what a proxy says may be HTML
      signal.throwIfAborted();
      throw new Error(refusal?.error?.message ?? `HTTP status ${response.status}, expected 200. Try again.`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const more = choice?.delta?.content ?? choice?.text ?? "";
      if (more) {
        first ??= performance.now();
        message.content += more;
        drawing.soon();
      }
      if (event.usage) {
        const seconds = (performance.now() - (first ?? begun)) / 1000;
        const speed = event.usage.completion_tokens / Math.max(seconds, 0.001);
        const figures = `${event.usage.completion_tokens} tokens, ${speed.toFixed(1)} a second`;
        following(() => said.parentElement.append(
          Object.assign(document.createElement("p"), { className: "figures", textContent: figures })));
      }
    }
  } catch (error) {
    if (!message.content) {
      messages = messages.filter((one) => one !== message);
      said.parentElement.remove();
    }
    if (running !== mine) return; // a new conversation has begun
    if (error.name === "AbortError") statusLine.textContent = "Stopped.";
    else article("error", error.message).parentElement.classList.add("error");
  } finally {
    drawing.now();
    if (running === mine) {
      running = null;
      busy(false);
      next.focus();
    }
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || (info.chat && !text.value.trim())) return;
  messages.push({ role: "user", content: text.value });
  article("user", text.value);
  text.value = "";
  answer();
});

text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  messages = [];
  log.replaceChildren();
  statusLine.textContent = "";
  busy(false);
  text.focus();
});
at("again").addEventListener("click", () => {
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  while (log.lastElementChild && !log.lastElementChild.classList.contains("user")) log.lastElementChild.remove();
  answer();
});
at("key").addEventListener("change", () => sessionStorage.setItem(KEY, at("key").value));

at("key").value = sessionStorage.getItem(KEY) ?? "";
info = await (await fetch("page.json")).json();
document.title = info.model;
at("model").textContent = info.model;
if (!info.chat) {
  at("system-field").hidden = true;
  statusLine.textContent = "This model has no chat template: it continues what you write.";
}
