// The page of one run: its curves, steps, requests and checkpoints.

import { api, Badge, CopyButton, count, Dialog, duration, Empty, html, live, Loading, number, place, Problem, runName, sessionOf, Tabs, Text, to, useClock, useEffect, useLoaded, useMemo, useState, When } from './core.js';
import { Chart, COLORS, metricsOf, SmallChart } from './chart.js';
import { CheckpointTable } from './checkpoints.js';
import { Cell, VirtualList } from './list.js';
import { lastStep, useCurves } from './runs.js';

const SMALL = 5;
const NONE = [];

export function Run({ id }) {
  useClock();
  const route = `api/v1/training_runs/${encodeURIComponent(id)}`;
  const { data: run, error, reload } = useLoaded((signal) => api(route, { signal }), [id]);
  const [change, setChange] = useState({});
  const [version, setVersion] = useState(0);
  const ids = useMemo(() => (run ? [id] : []), [run?.training_run_id]);
  const { curves, latest, add, loaded } = useCurves(ids);
  const points = curves[id] ?? NONE;
  useEffect(() => {
    if (!run || !loaded) return undefined;
    return live(() => new URLSearchParams({ run: id, after: lastStep(latest.current[id]) }), {
      run: ({ points: fresh, ...now }) => {
        setChange(now);
        setVersion((one) => one + 1);
        if (fresh.length) add(id, fresh);
      },
    });
  }, [run?.training_run_id, loaded]);
  const series = useMemo(() => (run ? [{ id, label: runName(run), color: COLORS[0], points }] : []), [run, points]);
  const small = useMemo(() => metricsOf(series).filter((one) => one !== 'loss').slice(0, SMALL), [series]);
  if (error) return html`<h1>Training run</h1><${Problem} error=${error} />`;
  if (!run) return html`<${Loading} />`;
  const now = { ...run, ...change };
  const tab = place().query.get('tab') || 'steps';
  return html`
    <header class="page-head"><h1><${Text} max=${160}>${runName(run)}</${Text}></h1><${Badge} kind=${now.status ?? 'idle'} />
      <span class="grow"></span>
      ${run.last_sampler_checkpoint && html`<a class="button" href=${to.playground(run.last_sampler_checkpoint.tinker_path)}>Playground</a>`}
      <a class="button" href=${`training_runs?compare=${encodeURIComponent(id)}`}>Compare</a>
    </header>
    <dl class="facts">
      <div><dt>Steps</dt><dd>${count(now.steps)}</dd></div>
      <div><dt>Loss</dt><dd>${number(now.last_loss)}</dd></div>
      <div><dt>Base model</dt><dd><${Text} max=${80}>${run.base_model}</${Text}></dd></div>
      <div><dt>LoRA rank</dt><dd>${run.lora_rank}</dd></div>
      <div><dt>Last request</dt><dd><${When} time=${now.last_request_time} /></dd></div>
      <div><dt>Session</dt><dd><a href=${to.session(sessionOf(id))}>${sessionOf(id).slice(0, 8)}…</a></dd></div>
      <div><dt>Id</dt><dd class="id"><code>${id}</code> <${CopyButton} text=${id} /></dd></div>
    </dl>
    ${run.corrupted && html`<p class="problem">The server cannot rebuild this model from its log. Start again from a checkpoint.</p>`}
    ${points.length > 0 && html`<${Chart} series=${series} name="run" title="Curve" height=${300} />
      <div class="small-charts">${small.map((metric) => html`<${SmallChart} key=${metric} series=${series} metric=${metric} />`)}</div>`}
    <${Tabs} current=${tab} tabs=${[['steps', 'Steps'], ['requests', 'Requests'], ['checkpoints', 'Checkpoints'], ['metadata', 'Metadata']]} />
    ${tab === 'steps' && (loaded ? html`<${Steps} points=${points} />` : html`<${Loading} />`)}
    ${tab === 'requests' && html`<${Requests} id=${id} version=${version} />`}
    ${tab === 'checkpoints' && html`<${RunCheckpoints} id=${id} version=${version} onChange=${reload} />`}
    ${tab === 'metadata' && html`<${Metadata} metadata=${run.user_metadata} />`}`;
}

const STEP_COLUMNS = [
  { name: 'Step', width: '80px', narrow: '52px', kind: 'num' },
  { name: 'Loss', width: '1fr', kind: 'num' },
  { name: 'Learning rate', width: '1fr', kind: 'num wide' },
  { name: 'Gradient norm', width: '1fr', kind: 'num wide' },
  { name: 'Tokens', width: '1fr', kind: 'num' },
  { name: 'Compute', width: '1fr', kind: 'num wide' },
  { name: 'When', width: '1fr' },
];

function Steps({ points }) {
  const fetchPage = async (offset, limit) => {
    const end = points.length - offset;
    return { rows: points.slice(Math.max(0, end - limit), end).reverse(), total: points.length };
  };
  return html`<section class="card flush"><${VirtualList} label="Steps" columns=${STEP_COLUMNS} fetchPage=${fetchPage}
    source="steps" version=${points.length} rowHeight=${36} rowKey=${(point) => point.step}
    empty=${html`<${Empty} title="No steps yet"><p>A step is one optim_step that succeeded.</p></${Empty}>`}
    renderRow=${({ step, steps, metrics, time }) => html`
      <${Cell} kind="num">${steps > 1 ? `${step - steps + 1}–${step}` : step}</${Cell}>
      <${Cell} kind="num">${number(metrics.loss)}</${Cell}>
      <${Cell} kind="num wide">${number(metrics.learning_rate)}</${Cell}>
      <${Cell} kind="num wide">${number(metrics.grad_norm)}</${Cell}>
      <${Cell} kind="num">${count(Math.round(metrics.tokens ?? 0))}</${Cell}>
      <${Cell} kind="num wide">${duration(metrics.seconds)}</${Cell}>
      <${Cell} kind="muted"><${When} time=${time} /></${Cell}>`} /></section>`;
}

const REQUEST_COLUMNS = [
  { name: 'Number', width: '76px', narrow: '58px', kind: 'num' },
  { name: 'Kind', width: 'minmax(120px, 1fr)', narrow: '1fr' },
  { name: 'State', width: 'minmax(90px, 2fr)', narrow: '1fr' },
  { name: 'Tokens', width: '90px', kind: 'num wide' },
  { name: 'Took', width: '90px', kind: 'num wide' },
  { name: 'Arrived', width: '110px', kind: 'wide' },
];
const STATES = { active: 'running or next', paused_capacity: 'waits for capacity', paused_rate_limit: 'waits for a limit of yours' };

function Requests({ id, version }) {
  const [read, setRead] = useState(null);
  const fetchPage = async (offset, limit) => {
    const page = await api(`api/v1/console/runs/${encodeURIComponent(id)}/requests?limit=${Math.min(limit, 500)}&offset=${offset}`);
    return { rows: page.requests, total: page.total_count };
  };
  return html`<section class="card flush"><${VirtualList} label="Requests" columns=${REQUEST_COLUMNS} fetchPage=${fetchPage} source=${`requests ${id}`} version=${version}
    rowHeight=${40} rowKey=${(one) => one.request_id}
    empty=${html`<${Empty} title="No requests"><p>The server deletes finished requests after some time.</p></${Empty}>`}
    renderRow=${(one) => html`
      <${Cell} kind="num">${one.seq_id}</${Cell}>
      <${Cell}><code title=${one.request_id}>${one.kind}</code></${Cell}>
      <${Cell} kind="state"><${Badge} kind=${one.status} />
        ${one.queue_state && html`<span class="muted">${STATES[one.queue_state] ?? one.queue_state}${one.queue_state_reason ? `: ${one.queue_state_reason}` : ''}</span>`}
        ${one.error && html`<button class="quiet reason" title=${one.error} onClick=${() => setRead(one)}><${Text} max=${200}>${one.error}</${Text}></button>`}</${Cell}>
      <${Cell} kind="num wide">${count(one.tokens)}</${Cell}>
      <${Cell} kind="num wide">${duration((new Date(one.finished_at ?? Date.now()) - new Date(one.created_at)) / 1000)}</${Cell}>
      <${Cell} kind="wide muted"><${When} time=${one.created_at} /></${Cell}>`} />
    ${read && html`<${Dialog} title=${`Request ${read.seq_id} failed: ${read.kind}`} onClose=${() => setRead(null)}>
      <p><${Text} max=${4000}>${read.error}</${Text}></p><p class="id muted"><code>${read.request_id}</code> <${CopyButton} text=${read.request_id} /></p>
      <div class="actions"><button onClick=${() => setRead(null)}>Close</button></div></${Dialog}>`}</section>`;
}

function RunCheckpoints({ id, version, onChange }) {
  const fetchPage = async (offset, limit) => {
    const { checkpoints } = await api(`api/v1/training_runs/${encodeURIComponent(id)}/checkpoints`);
    return { rows: checkpoints.slice(offset, offset + limit), total: checkpoints.length };
  };
  return html`<${CheckpointTable} source=${`of ${id}`} version=${version} fetchPage=${fetchPage} onChange=${onChange} />`;
}

function Metadata({ metadata }) {
  const entries = Object.entries(metadata ?? {});
  if (!entries.length) return html`<${Empty} title="No metadata"><p>user_metadata of create_lora_training_client is shown here.</p></${Empty}>`;
  return html`<section class="card"><dl class="pairs">${entries.map(([name, value]) => html`
    <div key=${name}><dt><${Text} max=${200}>${name}</${Text}></dt><dd><${Text} max=${2000}>${value}</${Text}></dd></div>`)}</dl></section>`;
}
