from torsh_distributed.observe.export.grafana_dashboard import grafana_dashboard as grafana_dashboard
from torsh_distributed.observe.metrics.catalogue import CATALOGUE as CATALOGUE
from torsh_distributed.observe.metrics.process_metrics import metric as metric
from torsh_distributed.observe.metrics.process_metrics import process_metrics as process_metrics
from torsh_distributed.observe.metrics.process_metrics import start_reporting as start_reporting
from torsh_distributed.observe.metrics.process_metrics import stop_reporting as stop_reporting
from torsh_distributed.observe.metrics.rank_metrics import Metric as Metric
