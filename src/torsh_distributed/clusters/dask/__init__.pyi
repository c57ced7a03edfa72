from torsh_distributed.clusters.dask.dask_engine import DaskEngine as DaskEngine
from torsh_distributed.clusters.dask.rank_data import RankRows as RankRows
from torsh_distributed.clusters.dask.rank_data import rows_loader as rows_loader
from torsh_distributed.clusters.dask.run_on_dask import run_training as run_training
from torsh_distributed.clusters.dask.searching import SearchResult as SearchResult
from torsh_distributed.clusters.dask.searching import run_search as run_search
from torsh_distributed.clusters.hosted.reporting import report as report
