"""SmolLM2-135M-Instruct on the paged operators: weights, tokenizer, model, engine and packages."""
