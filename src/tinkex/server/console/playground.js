// The playground: a chat or a prompt, for one model or two side by side, with tokens as they are sampled.

import { address, api, failed, html, number, place, Problem, setQuery, shortId, useEffect, useLoaded, useRef, useState, useStored } from './core.js';

// Longer answers go on without colors: a page with very many elements is slow.
const MAX_COLORED = 4000;

/** The data of server-sent events, one JSON value after another. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end = text.indexOf('\n\n');
    while (end >= 0) {
      for (const line of text.slice(0, end).split('\n')) {
        if (line.startsWith('data: ') && line !== 'data: [DONE]') yield JSON.parse(line.slice(6));
      }
      text = text.slice(end + 2);
      end = text.indexOf('\n\n');
    }
  }
}

/** The tokens of a chunk: {text, logprob, tops}. A token may be a part of a character. */
function tokensOf(choice, decoder) {
  const entries = choice.logprobs?.content
    ?? (choice.logprobs?.tokens ?? []).map((token, index) => ({
      token,
      logprob: choice.logprobs.token_logprobs[index],
      top_logprobs: Object.entries(choice.logprobs.top_logprobs?.[index] ?? {}).map(([text, logprob]) => ({ token: text, logprob })),
    }));
  return entries.map((one) => ({
    text: one.bytes ? decoder.decode(new Uint8Array(one.bytes), { stream: true }) : one.token,
    logprob: one.logprob,
    tops: one.top_logprobs ?? [],
  }));
}

async function sample({ mode, model, messages, prompt, settings, signal, onTokens }) {
  const body = {
    model,
    stream: true,
    max_tokens: settings.maxTokens,
    temperature: settings.temperature,
    top_p: settings.topP,
    ...(settings.seed === '' ? {} : { seed: Number(settings.seed) }),
    ...(mode === 'chat' ? { messages, logprobs: true, top_logprobs: 5 } : { prompt, logprobs: 5 }),
  };
  const route = mode === 'chat' ? 'v1/chat/completions' : 'v1/completions';
  const headers = { 'Content-Type': 'application/json' };
  const answer = await fetch(address(route), { method: 'POST', headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw await failed(answer);
  const decoder = new TextDecoder();
  let content = '';
  let reason = null;
  for await (const event of eventsOf(answer)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices ?? [];
    if (!choice) continue;
    content += choice.delta?.content ?? choice.text ?? '';
    reason = choice.finish_reason ?? reason;
    onTokens(tokensOf(choice, decoder), content, reason);
  }
  return { content, reason };
}

/** How likely a token was, as one of ten classes. */
const likelihood = (logprob) => Math.min(9, Math.max(0, Math.floor(Math.exp(logprob) * 10)));

function Token({ token }) {
  const chance = Math.exp(token.logprob);
  const tops = token.tops.map((one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`).join('\n');
  const about = `${(100 * chance).toFixed(1)} %, logprob ${number(token.logprob, 3)}${tops ? `\n\n${tops}` : ''}`;
  return html`<span class="token p${likelihood(token.logprob)}" title=${about}>${token.text}</span>`;
}

function Answer({ answer, colored }) {
  const rest = answer.tokens.length > MAX_COLORED ? answer.tokens.slice(MAX_COLORED).map((one) => one.text).join('') : '';
  return html`<div class="answer ${answer.busy ? 'busy' : ''}" dir="auto">
    ${colored && answer.tokens.length
      ? html`${answer.tokens.slice(0, MAX_COLORED).map((token, index) => html`<${Token} key=${index} token=${token} />`)}${rest}`
      : answer.content}
    ${answer.busy && html`<span class="caret" aria-hidden="true"></span>`}
  </div>
  <p class="muted small" role="status" aria-live=${answer.busy && answer.tokens.length ? 'off' : 'polite'}>${answer.busy && !answer.tokens.length ? 'Waiting for the first token…' : `${answer.tokens.length} tokens`}
    ${answer.rate && !answer.busy ? `, ${answer.rate.toFixed(1)} tokens/s` : ''}${answer.mean !== undefined ? `, mean logprob ${number(answer.mean, 3)}` : ''}
    ${answer.reason === 'length' ? ', stopped at the limit' : ''}</p>
  <${Problem} error=${answer.error} />`;
}

const IDEAS = ['How are you?', 'Explain gravity to a child.', 'Write a line of a sea shanty.'];

/** A checkpoint by its name first, which is what differs between those of one run. */
function labelOf(model) {
  if (!model.startsWith('tinker://')) return model;
  const [run, , name] = model.replace('tinker://', '').split('/');
  return `${name} · ${shortId(run)}`;
}

const EMPTY = { tokens: [], content: '', busy: false };

export function Playground() {
  const { query } = place();
  const asked = query.get('checkpoint');
  const { data: models, error } = useLoaded((signal) => api('v1/models', { signal }), []);
  const bases = (models?.data ?? []).filter((one) => one.owned_by === 'tinkex').map((one) => one.id);
  const saved = (models?.data ?? []).filter((one) => one.owned_by !== 'tinkex').map((one) => one.id);
  const [mode, setMode] = useStored('playground.mode', 'chat');
  const [colored, setColored] = useStored('playground.colors', true);
  const [settings, setSettings] = useStored('playground.settings', { maxTokens: 128, temperature: 0.7, topP: 1, seed: '' });
  const [left, setLeft] = useState('');
  const [right, setRight] = useState(asked ?? '');
  const [prompt, setPrompt] = useState('');
  const [turns, setTurns] = useState([]);
  const [running, setRunning] = useState(null);
  const sampling = useRef(null);
  // A page that is left samples nothing more.
  useEffect(() => () => sampling.current?.abort(), []);
  const end = useRef(null);
  useEffect(() => {
    if (!models || left) return;
    // A checkpoint of a link stands beside its base model.
    setLeft(bases[0] ?? '');
    if (!asked && saved.length) setRight(saved[0]);
  }, [models]);
  useEffect(() => end.current?.scrollIntoView({ block: 'nearest' }), [turns.length]);
  const sides = [left, right].filter(Boolean);
  // Before the models are known, a side is missing.
  const isReady = prompt && sides.length > 0 && (models || error);
  const set = (name, value) => setSettings({ ...settings, [name]: value });

  const send = async (event) => {
    event?.preventDefault();
    if (running || !isReady) return;
    const stop = new AbortController();
    sampling.current = stop;
    setRunning(stop);
    const turn = { prompt, answers: sides.map((model) => ({ ...EMPTY, model, busy: true })) };
    const before = mode === 'chat' ? turns.filter((one) => one.mode === 'chat') : [];
    const all = mode === 'chat' ? [...turns, { ...turn, mode }] : [{ ...turn, mode }];
    setTurns(all);
    if (mode === 'chat') setPrompt('');
    const index = all.length - 1;
    const update = (side, change) => setTurns((old) => old.map((one, place_) => (place_ !== index ? one : {
      ...one, answers: one.answers.map((answer, number_) => (number_ === side ? { ...answer, ...change(answer) } : answer)),
    })));
    await Promise.all(sides.map(async (model, side) => {
      const messages = [
        ...before.flatMap((one) => {
          const answer = one.answers.find((other) => other.model === model) ?? one.answers[0];
          return [{ role: 'user', content: one.prompt }, { role: 'assistant', content: answer.content }];
        }),
        { role: 'user', content: prompt },
      ];
      const began = performance.now();
      // Tokens are drawn once a frame, however fast they come.
      let pending = [];
      let latest = '';
      let ended = null;
      let frame = 0;
      const flush = () => {
        frame = 0;
        const fresh = pending;
        pending = [];
        update(side, (answer) => ({ tokens: [...answer.tokens, ...fresh], content: latest, reason: ended }));
      };
      try {
        await sample({
          mode, model, messages, prompt, settings, signal: stop.signal,
          onTokens: (tokens, content, reason) => {
            pending.push(...tokens);
            latest = content;
            ended = reason;
            frame ||= requestAnimationFrame(flush);
          },
        });
      } catch (failure) {
        if (failure.name !== 'AbortError') update(side, () => ({ error: failure }));
      }
      cancelAnimationFrame(frame);
      flush();
      const seconds = (performance.now() - began) / 1000;
      update(side, (answer) => {
        const known = answer.tokens.filter((one) => Number.isFinite(one.logprob));
        const sum = known.reduce((total, one) => total + one.logprob, 0);
        return { busy: false, rate: answer.tokens.length / seconds, mean: known.length ? sum / known.length : undefined };
      });
    }));
    setRunning(null);
  };
  const onKeyDown = (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) send(event);
  };
  const choice = (label, value, change, optional) => html`<label class="grow">${label}
    <select value=${value} onChange=${(event) => { change(event.target.value); setQuery({ mode: '', checkpoint: '' }); }}>
      ${optional && html`<option value="">none</option>`}
      <optgroup label="Base models">${bases.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</optgroup>
      ${(saved.length > 0 || asked) && html`<optgroup label="Checkpoints">
        ${asked && !saved.includes(asked) && html`<option value=${asked}>${labelOf(asked)}</option>`}
        ${saved.map((one) => html`<option key=${one} value=${one}>${labelOf(one)}</option>`)}</optgroup>`}
    </select></label>`;
  return html`<header class="page-head"><h1>Playground</h1><span class="grow"></span>
      ${turns.length > 0 && html`<button onClick=${() => setTurns([])} disabled=${running}>Clear</button>`}
      <div class="group" role="group" aria-label="Kind of prompt">
        <button aria-pressed=${mode === 'chat'} onClick=${() => { setMode('chat'); setTurns([]); }}>Chat</button>
        <button aria-pressed=${mode === 'prompt'} onClick=${() => { setMode('prompt'); setTurns([]); }}>Prompt</button>
      </div></header>
    <${Problem} error=${error} />
    <section class="card"><div class="toolbar">
      ${choice('Model', left, setLeft, false)}
      ${choice('Beside it', right, setRight, true)}
    </div>
    <div class="toolbar">
      <label>Temperature <input type="number" min="0" max="10" step="0.1" value=${settings.temperature} onInput=${(event) => set('temperature', Number(event.target.value))} /></label>
      <label>Tokens <input type="number" min="1" max="32768" value=${settings.maxTokens} onInput=${(event) => set('maxTokens', Number(event.target.value))} /></label>
      <label>Top p <input type="number" min="0.01" max="1" step="0.01" value=${settings.topP} onInput=${(event) => set('topP', Number(event.target.value))} /></label>
      <label>Seed <input type="number" min="0" max="2147483647" placeholder="random" value=${settings.seed} onInput=${(event) => set('seed', event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${colored} onChange=${(event) => setColored(event.target.checked)} /> color by likelihood</label>
      ${colored && html`<span class="scale" aria-hidden="true">unlikely ${[0, 2, 4, 6, 8, 9].map((one) => html`<span class="token p${one}"> </span>`)} likely</span>`}
    </div></section>
    <div class="turns">${turns.map((turn, index) => html`<article key=${index} class="turn">
      <div class="question" dir="auto">${turn.prompt}</div>
      <div class="sides s${turn.answers.length}">${turn.answers.map((answer, side) => html`<section key=${side} class="card side" aria-label=${`Answer of ${answer.model.slice(0, 100)}`}>
        <h2 title=${answer.model}>${labelOf(answer.model).slice(0, 120)}</h2><${Answer} answer=${answer} colored=${colored} /></section>`)}</div>
    </article>`)}<div ref=${end}></div></div>
    ${!turns.length && html`<div class="ideas">${IDEAS.map((idea) => html`<button key=${idea} onClick=${() => { setPrompt(idea); document.getElementById('prompt').focus(); }}>${idea}</button>`)}</div>`}
    <form class="card prompt" onSubmit=${send}>
      <label class="visually-hidden" for="prompt">${mode === 'chat' ? 'Message' : 'Prompt'}</label>
      <textarea id="prompt" rows=${mode === 'chat' ? 2 : 5} dir="auto" placeholder=${mode === 'chat' ? 'Ask something' : 'Text that the model continues'} value=${prompt}
        onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${running ? html`<button type="button" onClick=${() => running.abort()}>Stop</button>` : html`<button class="primary" type="submit" disabled=${!isReady}>Send <kbd>Ctrl ⏎</kbd></button>`}
    </form>`;
}
