"""Commands that say how many workers a load needs: plan, before there are any, and scaler, while they run."""
