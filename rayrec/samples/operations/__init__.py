"""Feature operations: columns computed from columns, declared in a run's config, for training and serving.

    data:
      features:
        - {op: hash, input: city, output: city_id, buckets: 100000}
        - {op: truncate, inputs: [items, times], length: 50}

They run in this order, and each sees the columns that earlier ones wrote. Without `output` (or `outputs`),
the input is replaced. Mistakes that the types of the columns reveal are reported before a row is read. The
result of a row depends on that row alone (and, for negatives, on its key and the run's seed): it is the same
in any batch, in the cache of prepared rows, and in serving, where `FeatureProgram.one` takes a row of Python
values.

Integers of any width are read as int64, and every kind of text or list in one form; nothing is padded. NaN is
treated as null by the operations on numbers.

    op             makes                                     of null
    hash           ids of texts or integers, or in lists     null
    cross          ids of several columns together           null if any part is
    bucketize      number of boundaries reached              null
    clip           numbers within limits                     null
    log            log(1 + x), float32                       null
    time_features  hour, weekday, sine and cosine of both    null
    time_since     time from one column to another           null if either is
    truncate       newest or oldest events of lists          a null list stays; in lists an event like others
    concat         one list of lists and single values       adds nothing
    select_events  the events of some behaviors             a null behavior is not selected
    merge_events   one history of several, by time           null lists are no events; null times come first
    negatives      items that a row did not choose           excludes nothing
    fill           a value where there is none               the value
    join_history   a key's events before a time, from a     without key or time, an empty history
                   store of events
    join_neighbors items near a row's, and how many      nothing near; a count of 0
                   met its item of late, from a graph
    prompt         tokens of a prompt, and of what is to be   null without user or item; an empty history
                   said, for language models
    python         what a function of yours gives            as your function wants

One example of each, on rows with `user` and `city` (texts), `price` (float), `shown_at` (UNIX seconds),
`clock` (timestamp), `target` (an item id), and the lists `items`, `times`, `behaviors` and `cart_items`,
`cart_times`:

    - {op: hash, input: city, output: city_id, buckets: 100000}
    - {op: cross, inputs: [city, items], output: city_items, buckets: 1000000}
    - {op: bucketize, input: price, output: price_level, boundaries: [1, 5, 20, 100]}
    - {op: clip, input: price, output: usual_price, low: 0, high: 1000}
    - {op: log, input: price, output: log_price, negatives: zero}
    - {op: time_features, input: shown_at, unit: s, zone: Europe/Berlin,
       outputs: {hour: hour, weekday: weekday, day_sin: day_x, day_cos: day_y}}
    - {op: time_since, input: times, relative_to: shown_at, unit: s, counted_in: h, output: hours_since}
    - {op: truncate, inputs: [items, times, behaviors], outputs: [new_items, new_times, new_behaviors],
       length: 2}
    - {op: concat, inputs: [items, target], output: with_target}
    - {op: select_events, by: behaviors, values: [1, 2], inputs: [items, times],
       outputs: [bought_items, bought_times]}
    - op: merge_events
      sources:
        - {behavior: 0, time: times, values: [items]}
        - {behavior: 7, time: cart_times, values: [cart_items]}
      time: all_times
      values: [all_items]
      behavior: all_behaviors
    - {op: negatives, output: negatives, num: 5, exclude: [items, target],
       items: {path: beauty/items.parquet, column: item_id, counts: train_count}}
    - {op: fill, input: items, output: known_items, value: []}
    - {op: join_history, store: clicks, key: user, time: clock, last: 3,
       outputs: {clicked: items, clicked_at: times}}
    - {op: join_neighbors, graph: graph, items: items, item: target, time: clock, k: 5, output: near,
       counts: {met_in_an_hour: 3600, met_in_a_day: 86400}}
    - {op: prompt, prompt: "Bought: {history.titles}Next: ", completion: "{codes}",
       items: {path: beauty/items.parquet}, semantic_ids: beauty/semantic_ids, tokenizer: base,
       history: items, item: target, max_events: 20, max_tokens: 256}
    - {op: python, function: "my_features:items_per_price", inputs: [items, price],
       outputs: {items_per_price: float32}}

The settings of each are in its config class, which `config.OPERATIONS` names. Others are added there, or by
an installed package: docs/guides/add-a-feature-operation.md.
"""
