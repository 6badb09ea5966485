-- Commits a span if the placement is still the one that it was chosen on. Returns 1, or 0 when it is not.
-- ARGV: expected version, server id, address, description, lease, number of blocks.
if version() ~= ARGV[1] then return 0 end
local server_id, address = ARGV[2], ARGV[3]
local older = redis.call('HGET', ADDRESSES, address)
for _, replaced in ipairs({older or server_id, server_id}) do
  local entry = redis.call('HGET', SERVERS, replaced)
  if entry then remove(replaced, entry) end
end
redis.call('HSET', SERVERS, server_id, address .. '\n' .. ARGV[4])
redis.call('HSET', ADDRESSES, address, server_id)
hear(server_id, ARGV[5])
redis.call('HSET', PLACEMENT, 'blocks', ARGV[6])
changed(server_id)
return 1
