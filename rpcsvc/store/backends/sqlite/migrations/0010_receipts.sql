-- How anyone with a node of their own can check that a settled transfer was made (JSON).
ALTER TABLE transfers ADD COLUMN receipt TEXT CHECK (receipt IS NULL OR state = 'settled');
