# %% [markdown]
# # From records to a picture
#
# Orders are produced, exported to Parquet exactly once, asked by Spark and drawn. Every `# %%` is a
# cell for Jupyter, VS Code and Spyder; it runs as a script, too:
#
#     raftmq dev &
#     python examples/export_and_plot.py 127.0.0.1:9092 /tmp/orders
#
# Needs Java 17 and `pip install "raftmq[spark]" matplotlib`.

# %% What it uses, and where things are
import json
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import matplotlib.pyplot as plt

from raftmq_client import Producer
from raftmq_spark.export.archive import archive_files
from raftmq_spark.export.job import Order, export
from raftmq_spark.export.planning import Wishes
from raftmq_spark.export.runner import SparkRunner
from raftmq_spark.export.store import locate
from raftmq_spark.security import ClientSettings
from raftmq_spark.session import spark_session

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else "orders-example")
TOPIC, GROUP, ORDERS = "example-orders", "example-archive", 20_000

# %% Produce a week of orders, more of them by day than by night
chance = random.Random(7)
start = datetime(2026, 3, 2, tzinfo=UTC)
with Producer(BOOTSTRAP, value_serializer="json", linger_ms=20) as producer:
    for number in range(ORDERS):
        hour = min(23.99, max(0.0, chance.gauss(14, 4)))
        at = start + timedelta(days=chance.randrange(7), hours=hour)
        shop = chance.choice(["Lisbon", "Oslo", "Quito"])
        order = {"number": number, "shop": shop, "euros": round(chance.lognormvariate(3, 1), 2)}
        producer.send(TOPIC, order, shop.encode(), timestamp=int(at.timestamp() * 1000))

# %% Export: what the group has not exported yet, exactly once. Run this cell as often as you like
spark = spark_session("orders", spark__sql__session__timeZone="UTC")
archive = FOLDER / "archive"
with SparkRunner() as runner:  # uses the session that is there
    report = export(
        Order((TOPIC,), locate(str(archive)), ClientSettings(BOOTSTRAP), Wishes(GROUP)), runner
    )
print("new rows:", 0 if report.manifest is None else report.manifest.rows)

# %% Ask: the topic and the date are columns, they are in the paths
orders = spark.read.option("basePath", str(archive)).parquet(*archive_files(str(archive)))
orders.createOrReplaceTempView("orders")
per_hour = spark.sql(
    """
    SELECT hour(timestamp) AS hour, get_json_object(cast(value AS string), '$.shop') AS shop,
           count(*) AS orders, sum(get_json_object(cast(value AS string), '$.euros')) AS euros
    FROM orders GROUP BY 1, 2 ORDER BY 1, 2
    """
).toPandas()
days = [
    row.date.isoformat()
    for row in spark.sql("SELECT DISTINCT date FROM orders ORDER BY 1").collect()
]
print("days:", ", ".join(days))
print("orders:", int(per_hour["orders"].sum()), "euros:", round(float(per_hour["euros"].sum())))

# %% Draw
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for shop, rows in per_hour.groupby("shop"):
    axes.plot(rows["hour"], rows["orders"], marker="o", markersize=3, label=shop)
axes.set(xlabel="hour of the day (UTC)", ylabel="orders in the week", xlim=(0, 23), ylim=(0, None))
axes.set_title(f"{int(per_hour['orders'].sum()):,} orders, {days[0]} to {days[-1]}")
axes.legend(frameon=False)
picture = FOLDER / "orders.png"
figure.savefig(picture, dpi=120)
print("picture:", json.dumps(str(picture)))

# %% Done
spark.stop()
