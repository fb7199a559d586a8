// What a reader meets in each panel: its words, their sizes, and what is cut or lies outside.
const SMALLEST_PLOT = 60;
const SMALLEST_TEXT = 11;

/** One entry per panel: title, type, all words with their colours, legend, faults. */
export function measured() {
  return [...document.querySelectorAll('[data-panel]')]
    .filter((place) => place.dataset.type !== 'row')
    .map((place) => {
      const texts = textsOf(place);
      return {
        title: place.dataset.panel,
        type: place.dataset.type,
        words: texts.map(({ text }) => text),
        colors: texts.map(({ parent }) => getComputedStyle(parent).color),
        legend: [...place.querySelectorAll('[data-testid^="data-testid VizLegend series"]')].map((one) => one.innerText),
        faults: [...texts.flatMap((text) => [...small(text), ...cut(text, place)]), ...crowded(place)],
      };
    });
}

function textsOf(place) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const { textContent, parentElement } = walker.currentNode;
    const shown = parentElement.checkVisibility() && getComputedStyle(parentElement).visibility !== 'hidden';
    if (textContent.trim() && shown) {
      const size = parseFloat(getComputedStyle(parentElement).fontSize);
      found.push({ node: walker.currentNode, text: textContent.trim(), size, parent: parentElement });
    }
  }
  return found;
}

function small({ text, size }) {
  return size < SMALLEST_TEXT ? [`"${text}" is ${Math.round(size)} pixels high`] : [];
}

function cut({ node, text, parent }, place) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const words = range.getBoundingClientRect();
  for (let box = parent; box !== place.parentElement; box = box.parentElement) {
    const edge = box.getBoundingClientRect();
    const hides = box === place || getComputedStyle(box).overflow !== 'visible';
    const over = Math.max(words.right - edge.right, words.bottom - edge.bottom, edge.left - words.left, edge.top - words.top);
    if (hides && over > 0.1) {
      return [`"${text}" is cut by ${Math.round(over)} pixels`];
    }
  }
  return [];
}

function crowded(place) {
  const plot = place.querySelector('.u-over');
  return plot && plot.clientHeight < SMALLEST_PLOT ? [`the plot is ${plot.clientHeight} pixels high`] : [];
}
