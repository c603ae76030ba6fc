"""Parameters on shards that workers push to and pull from at their own pace; state machines without I/O or clocks."""
