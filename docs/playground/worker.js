// Python, in a worker of its own, so that the page never waits: it answers {id, method, given} with {id, answer}.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const say = (progress) => postMessage({ progress });

async function start() {
  say("Loading Python, 12 MB");
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  say("Loading the library");
  const library = await fetch(new URL("./library.zip", import.meta.url));
  if (!library.ok) throw new Error(`library.zip: ${library.status} ${library.statusText}`);
  python.unpackArchive(await library.arrayBuffer(), "zip");
  return python.runPython("import playground; playground.Playground()");
}

const started = start();
started.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);

onmessage = async ({ data: { id, method, given } }) => {
  const playground = await started;
  const begun = performance.now();
  const answer = playground.answer(method, JSON.stringify(given));
  postMessage({ id, answer, ms: performance.now() - begun });
};
