"""The workers of a job find each other: addresses, and the roll call.

```
answer_roll ──Facts──> call_roll ──"go"──> the framework's own service
```

Each worker says in the roll call which job it belongs to. Who belongs to
another job is refused, before a framework connects the workers.
"""

# Only `answering` imports Keras: a coordinator's process has none.
