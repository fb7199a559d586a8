// A whole dashboard at Grafana's measures, drawn from its JSON and from what Prometheus answers to its queries.
import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { flushSync } from 'react-dom';
import { ThemeContext, createTheme, dateTime } from '@grafana/data';
import { PanelChrome } from '@grafana/ui';
import './gauge.js';
import { measured } from './measure.js';
import { Panel } from './panels.jsx';

const [COLUMNS, CELL, GAP, MARGIN, HEAD] = [24, 30, 8, 16, 48];
const theme = createTheme({ colors: { mode: 'light' } });
const errors = [];
window.addEventListener('error', ({ message }) => errors.push(message));

function placed({ x, y, w, h }, width) {
  const column = (width + GAP) / COLUMNS;
  return { left: x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
}

function Place({ panel, width, children }) {
  const place = placed(panel.gridPos, width);
  return (
    <div data-panel={panel.title} data-type={panel.type} style={{ position: 'absolute', ...place }}>
      {children(place)}
    </div>
  );
}

function Dashboard({ dashboard, answers, annotations, range, chosen, width }) {
  const [from, to] = [dateTime(range.from), dateTime(range.to)];
  const timeRange = { from, to, raw: { from, to } };
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  const painted = annotations.map((mark) => ({ ...mark, color: theme.visualization.getColorByName(mark.color) }));
  const inside = width - 2 * MARGIN;
  return (
    <div className="page" style={{ width, height: HEAD + bottom * (CELL + GAP) + MARGIN }}>
      <header>
        <b>{dashboard.title}</b>
        <span>{chosen}</span>
      </header>
      <main style={{ position: 'absolute', left: MARGIN, top: HEAD }}>
        {dashboard.panels.map((panel) => (
          <Place key={panel.id} panel={panel} width={inside}>
            {(place) =>
              panel.type === 'row' ? (
                <h2>{panel.collapsed ? '▸' : '▾'} {panel.title}</h2>
              ) : (
                <PanelChrome title={panel.title} description={panel.description} width={place.width} height={place.height}>
                  {(innerWidth, innerHeight) => (
                    <Panel panel={panel} results={answers[panel.id]} annotations={painted} range={range}
                      timeRange={timeRange} theme={theme} width={innerWidth} height={innerHeight} />
                  )}
                </PanelChrome>
              )
            }
          </Place>
        ))}
      </main>
    </div>
  );
}

let root;

/** Draws it anew and returns what can be read on it: see measure.js. */
window.draw = async (given) => {
  root?.unmount();
  errors.length = 0;
  root = createRoot(document.getElementById('root'));
  flushSync(() =>
    root.render(
      <ThemeContext.Provider value={theme}>
        <Dashboard {...given} width={window.innerWidth} />
      </ThemeContext.Provider>
    )
  );
  await document.fonts.ready;
  await settled();
  return { errors, height: document.querySelector('.page').offsetHeight, panels: measured() };
};

/** Returns when three frames in a row have changed nothing. */
async function settled() {
  for (let before = '', same = 0; same < 3; ) {
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    const now = document.body.innerHTML;
    same = now === before ? same + 1 : 0;
    before = now;
  }
}
