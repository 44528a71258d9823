"""Commands that ask a running gateway for text: generate, chat, batch, bench."""
