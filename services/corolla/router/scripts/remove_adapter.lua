-- Removes an adapter. ARGV: name. Returns 1; 0 if it is not registered.
local before = redis.call('HGET', ADAPTERS, ARGV[1])
if not before then return 0 end
take_out(ARGV[1], before)
changed('adapters', READY)
return 1
