"""Pipeline parallelism: the model cut into stages, which ranks run one after another on parts of a batch."""
