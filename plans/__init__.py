"""The language that planning and running share: model, cluster, strategy, layout, routes, packing, schedule, plan."""
