"""The embedded pair: two tiny models, one tokenizer, and the synthetic problems that they were trained on."""
