"""Pictures of the chart's dashboards: drawn with Grafana's own components, of what a real
Prometheus answers.

Grafana's server isn't needed for it: its components are npm packages. browser.py makes a page of
them and shows it, drawing.py asks Prometheus and hands over. `python -m tools.pictures --to
FOLDER` draws all stories.
"""
